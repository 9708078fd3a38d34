"""The agent installs from its own folder into an empty environment and needs nothing of the server, nor torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

AGENT = Path(__file__).resolve().parents[2] / "worker_agent"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build writes into its source folder, which other processes are importing from."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "worker_agent"
    files = [file for file in AGENT.rglob("*") if file.suffix in {".py", ".toml"} and "build" not in file.parts]
    for file in files:
        target = source / file.relative_to(AGENT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(work)]
    subprocess.run([*command, str(source)], check=True)
    (built,) = work.glob("archipelago_agent-*.whl")
    return built


def test_the_wheel_carries_every_module_of_the_agent(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for file in AGENT.rglob("*.py"):
        if "build" not in file.relative_to(AGENT).parts:
            assert f"worker_agent/{file.relative_to(AGENT)}" in inside


def test_torch_is_an_extra_and_nothing_of_the_server_is_needed() -> None:
    project = tomllib.loads((AGENT / "pyproject.toml").read_text())["project"]
    assert {item.partition(">")[0] for item in project["dependencies"]} == {"httpx", "msgspec"}
    assert "torch>=2.4" in project["optional-dependencies"]["trainer"]


@pytest.mark.prove
def test_it_runs_in_an_environment_of_its_own_without_torch(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    said = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "archipelago-agent"), "--help"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout
    for verb in ("enroll", "run", "doctor", "train"):
        assert verb in said
    assert subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False).returncode == 1
    assert subprocess.run([str(python), "-c", "import django"], capture_output=True, check=False).returncode == 1
