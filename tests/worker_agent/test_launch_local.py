from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.servers import wait_until
from worker_agent.errors import LaunchFailed
from worker_agent.launch import Exited, Handle, LaunchOrder, Running
from worker_agent.launch.local import HANDLE_FILE, LocalLauncher, is_alive, log_tail, read_status, rotate
from worker_agent.protocol import Assignment, TrainOrder
from worker_agent.trainer.run import read_config

COMMAND = [sys.executable, str(Path(__file__).with_name("fake_trainer.py"))]


def order(work: Path, behaviour: str = "run-1", key: str = "a1") -> LaunchOrder:
    train = TrainOrder(job_id="j", member_id="m", generation=3, member_token=behaviour)
    assignment = Assignment(id=key, generation=3, kind="train", gpus=1, start_at_ms=0, stop_at_ms=1, train=train)
    return LaunchOrder(assignment, "http://127.0.0.1:1", work / key, "cpu", [])


def is_over(launcher: LocalLauncher, handle: Handle) -> bool:
    return isinstance(launcher.poll(handle), Exited)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(COMMAND)
    yield launcher
    for handle in [*launcher.adopt(tmp_path), *launcher.adopt(tmp_path / "work")]:
        launcher.stop(handle, force=True)
        wait_until(partial(is_over, launcher, handle), limit_s=5, what="cleared")


def working(handle: Handle) -> bool:
    return read_status(Path(handle.workdir)).get("state") == "training"


def test_the_token_is_in_a_private_file_and_not_on_the_command_line(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.start(order(tmp_path, "run-secret"))
    config = Path(handle.workdir) / "trainer-3.json"
    assert config.stat().st_mode & 0o777 == 0o600
    assert json.loads(config.read_text())["member_token"] == "run-secret"
    for name in ("cmdline", "environ"):
        assert b"run-secret" not in Path(f"/proc/{handle.pid}/{name}").read_bytes()


def test_the_real_trainer_reads_the_configuration(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.start(order(tmp_path))
    config = read_config(Path(handle.workdir) / "trainer-3.json")
    assert (config.generation, config.workdir, config.device, config.nproc) == (3, handle.workdir, "cpu", 1)


def test_a_stop_is_gentle_first(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.start(order(tmp_path))
    wait_until(lambda: working(handle), limit_s=5, what="at work")
    assert launcher.poll(handle) == Running()
    launcher.stop(handle, force=False)
    wait_until(lambda: launcher.poll(handle) == Exited(0), limit_s=5, what="ended with 0")


def test_force_ends_what_ignores_the_signal(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.start(order(tmp_path, "stubborn-1"))
    wait_until(lambda: working(handle), limit_s=5, what="at work")
    launcher.stop(handle, force=False)
    assert launcher.poll(handle) == Running()
    launcher.stop(handle, force=True)
    wait_until(lambda: launcher.poll(handle) == Exited(-signal.SIGKILL), limit_s=5, what="killed")


def test_another_launcher_adopts_the_process_and_learns_its_exit(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.start(order(tmp_path))
    wait_until(lambda: working(handle), limit_s=5, what="at work")
    other = LocalLauncher(COMMAND)
    assert list(other.adopt(tmp_path)) == [handle]
    other.stop(handle, force=False)
    wait_until(lambda: other.poll(handle) == Exited(0), limit_s=5, what="its own word: 0")


def test_a_process_whose_handle_was_never_written_is_found(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.start(order(tmp_path))
    wait_until(lambda: working(handle), limit_s=5, what="at work")
    (Path(handle.workdir) / HANDLE_FILE).unlink()
    (found,) = LocalLauncher(COMMAND).adopt(tmp_path)
    assert (found.pid, found.start_ticks, found.generation) == (handle.pid, handle.start_ticks, 3)
    assert abs(found.started_monotonic_ms - handle.started_monotonic_ms) < 1000


def test_a_copied_home_takes_over_nothing_of_the_one_it_was_copied_from(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    handle = launcher.start(order(tmp_path / "work"))
    wait_until(lambda: working(handle), limit_s=5, what="at work")
    shutil.copytree(tmp_path / "work", tmp_path / "copied")
    (tmp_path / "linked").symlink_to(tmp_path / "work")
    assert list(LocalLauncher(COMMAND).adopt(tmp_path / "copied")) == []
    assert list(LocalLauncher(COMMAND).adopt(tmp_path / "linked")) == [handle]


def test_a_reused_pid_is_not_mistaken(tmp_path: Path) -> None:
    handle = Handle(
        assignment_id="a",
        generation=1,
        pid=os.getpid(),
        start_ticks=1,
        kernel_boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        started_monotonic_ms=0,
        started_at_ms=0,
        workdir=str(tmp_path),
    )
    launcher = LocalLauncher(COMMAND)
    assert launcher.poll(handle) == Exited(None)
    launcher.stop(handle, force=True)  # this very process lives on to say so
    assert not is_alive(msgspec.structs.replace(handle, kernel_boot_id="another boot"))


def test_no_interpreter_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="could not be started"):
        LocalLauncher([str(tmp_path / "nothing")]).start(order(tmp_path))


def test_a_log_tail_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_bytes(b"good\n\x1b[31mred\r\n" + b"x" * 9000 + b"\xff\n")
    tail = log_tail(tmp_path)
    assert all(line.isprintable() and len(line) <= 500 for line in tail)


def test_a_log_is_rotated_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    with open(log, "ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        rotate(log, limit=50)
        writer.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert log.with_suffix(".log.1").read_bytes() == b"x" * 100
