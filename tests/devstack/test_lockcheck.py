from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from marketplace.devstack.lockcheck import FOLDER, problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "requirements")
    return tmp_path / "requirements"


def test_the_locks_are_what_the_requirements_ask_for() -> None:
    assert problems() == []


def test_a_requirement_that_is_not_locked_is_found(folder: Path) -> None:
    with open(folder / "base.in", "a") as stream:
        stream.write("left-pad\n")
    assert any("does not pin left-pad" in problem for problem in problems(folder))


def test_a_lock_older_than_its_requirement_is_found(folder: Path) -> None:
    (folder / "base.in").write_text((folder / "base.in").read_text().replace("django~=5.2", "django~=7.0"))
    assert any("asks for ~=7.0" in problem for problem in problems(folder))


def test_a_lock_that_names_a_place_or_torch_is_found(folder: Path) -> None:
    with open(folder / "trainer.txt", "a") as stream:
        stream.write("--index-url somewhere\ntorch==2.13.0\n")
    found = " ".join(problems(folder))
    assert "where packages come from" in found
    assert "pins torch" in found
    assert "without a hash" in found


def test_two_locks_with_two_versions_are_found(folder: Path) -> None:
    text = (folder / "trainer.txt").read_text()
    (folder / "trainer.txt").write_text(text.replace("numpy==", "numpy==9."))
    assert any("numpy is" in problem and " and 9." in problem for problem in problems(folder))
