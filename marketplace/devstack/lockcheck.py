"""Holds the locks to what they promise, without asking a registry: run by `make check`.

Every requirement of an .in file is pinned in its lock to a version that satisfies it; every pin carries hashes; a
package has one version in all locks; no lock names where packages come from; and torch is in none (see the Makefile).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from marketplace.devstack.state import REPOSITORY

FOLDER = REPOSITORY / "requirements"
NAMES = ("base", "embedded", "trainer", "dev")
UNLOCKED = {"torch"}


def asked(file: Path) -> list[Requirement]:
    """What an .in file asks for, with what the files it includes ask for."""
    found: list[Requirement] = []
    for line in file.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += asked(file.parent / text.removeprefix("-r ").strip())
        elif text:
            found.append(Requirement(text))
    return found


def pins(text: str) -> dict[str, str]:
    """Name and version of every pin of a lock."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", text, re.MULTILINE)
    return {str(canonicalize_name(name)): version for name, version in found}


def problems(folder: Path = FOLDER) -> list[str]:
    """What is wrong with the locks, one sentence each."""
    said: list[str] = []
    everywhere: dict[str, tuple[str, str]] = {}
    for name in NAMES:
        text = (folder / f"{name}.txt").read_text()
        locked = pins(text)
        for requirement in asked(folder / f"{name}.in"):
            version = locked.get(canonicalize_name(requirement.name))
            if version is None:
                said.append(f"{name}.txt does not pin {requirement.name}: run `make lock`")
            elif not requirement.specifier.contains(version, prereleases=True):
                said.append(f"{name}.txt pins {requirement.name} {version}, {name}.in asks for {requirement.specifier}")
        for package, version in locked.items():
            first, other = everywhere.setdefault(package, (name, version))
            if version != other:
                said.append(f"{package} is {other} in {first}.txt and {version} in {name}.txt")
        said += [f"{name}.txt pins {package}, which is in no lock" for package in sorted(UNLOCKED & set(locked))]
        if re.search(r"https?://|^--(?!hash)|find-links|index-url", text, re.MULTILINE):
            said.append(f"{name}.txt says where packages come from; that is the installer's business")
        if re.search(r"^[A-Za-z0-9][^\n]*==[^\n]*(?<!\\)$", text, re.MULTILINE):
            said.append(f"{name}.txt has a pin without a hash")
    return said


def main() -> None:
    found = problems()
    for problem in found:
        print(problem, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
