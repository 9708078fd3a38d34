"""The trainer as the agent runs it: a process, a configuration file, a coordinator over HTTP, exit codes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from worker_agent.protocol import RunSpec
from worker_agent.trainer.exchange_local import LocalCoordinator
from worker_agent.trainer.status import PROGRESS_FILE, STATUS_FILE, Status
from worker_agent.trainer.train import train

ROOT = Path(__file__).parents[3]


@pytest.fixture
def start() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def run(config: Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "worker_agent.trainer", "--config", str(config)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def status_of(config: Path) -> Status:
    workdir = Path(json.loads(config.read_text())["workdir"])
    return msgspec.json.decode((workdir / STATUS_FILE).read_bytes(), type=Status)


def test_a_process_trains_a_run_to_its_end_as_the_library_would(
    small_run: RunSpec, tmp_path: Path, serve: Callable, write_config: Callable[..., Path], start: Callable
) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    coordinator.admit("m")
    config = write_config(serve(coordinator).url, "m")
    process = start(config)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    alone = train(small_run, learners=1)
    assert [record.state_digest for record in coordinator.records] == [record.state_digest for record in alone.records]
    assert status_of(config).state == "done"
    assert status_of(config).exit_code == 0
    lines = (tmp_path / "m" / PROGRESS_FILE).read_text().splitlines()
    states = [json.loads(line)["state"] for line in lines]
    assert {"starting", "training", "applying", "finishing"} <= set(states)
    assert "m" not in log.split()  # the token is in no line of the log


def test_two_processes_of_one_island_train_as_one_would(
    small_run: RunSpec, tmp_path: Path, serve: Callable, write_config: Callable[..., Path], start: Callable
) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    coordinator.admit("m")
    process = start(write_config(serve(coordinator).url, "m", nproc=2))
    _, log = process.communicate(timeout=90)
    assert process.returncode == 0, log
    alone = train(small_run, learners=1)
    for mine, theirs in zip(coordinator.records, alone.records, strict=True):
        assert mine.train_loss_nats == pytest.approx(theirs.train_loss_nats, abs=0.01)
        assert mine.tokens == theirs.tokens
    assert coordinator.heldout[0] == pytest.approx(alone.heldout_bits_per_byte[0], abs=1e-4)
    assert coordinator.heldout[8] == pytest.approx(alone.heldout_bits_per_byte[8], abs=0.05)


def test_sigterm_drains_and_exits_zero(
    small_run: RunSpec, tmp_path: Path, serve: Callable, write_config: Callable[..., Path], start: Callable
) -> None:
    endless = msgspec.structs.replace(
        small_run,
        tokens=10**9,
        sync=msgspec.structs.replace(small_run.sync, inner_steps=10**6, round_deadline_ms=600_000),
    )
    coordinator = LocalCoordinator(endless, tmp_path / "store")
    coordinator.admit("m")
    server = serve(coordinator)
    process = start(write_config(server.url, "m"))
    for line in process.stderr:
        if "training" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert "leave" in server.seen
    assert "submit" not in server.seen


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize("victim", ["lead", "follower"])
def test_the_processes_of_an_island_end_together(
    small_run: RunSpec,
    tmp_path: Path,
    serve: Callable,
    write_config: Callable[..., Path],
    start: Callable,
    victim: str,
) -> None:
    endless = msgspec.structs.replace(
        small_run, tokens=10**9, sync=msgspec.structs.replace(small_run.sync, inner_steps=10**6)
    )
    coordinator = LocalCoordinator(endless, tmp_path / "store")
    coordinator.admit("m")
    config = write_config(serve(coordinator).url, "m", nproc=2)
    process = start(config)
    for line in process.stderr:
        if "training" in line:
            break
    (follower,) = children_of(process)
    watched = os.pidfd_open(follower)
    os.kill(process.pid if victim == "lead" else follower, signal.SIGKILL)
    process.communicate(timeout=60)
    ended, _, _ = select.select([watched], [], [], 30)
    os.close(watched)
    assert ended, "the follower lives on"
    if victim == "follower":
        assert process.returncode == 1
        assert status_of(config).state == "failed"


@pytest.mark.parametrize(("act", "code"), [("admit", 3), ("end", 4)])
def test_the_exit_code_tells_a_taken_place_from_an_ended_assignment(
    small_run: RunSpec,
    tmp_path: Path,
    serve: Callable,
    write_config: Callable[..., Path],
    start: Callable,
    act: str,
    code: int,
) -> None:
    coordinator = LocalCoordinator(small_run, tmp_path / "store")
    coordinator.admit("m")
    getattr(coordinator, act)("m")
    config = write_config(serve(coordinator).url, "m")
    process = start(config)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert status_of(config).exit_code == code


def test_nobody_there_is_exit_five_and_a_bad_configuration_exit_one(
    tmp_path: Path, write_config: Callable[..., Path], start: Callable
) -> None:
    lost = start(write_config("http://127.0.0.1:1", "m", patience_s=0.1))
    broken = tmp_path / "broken.json"
    broken.write_text('{"coordinator_url": 1}')
    wrong = start(broken)
    lost.communicate(timeout=60)
    _, log = wrong.communicate(timeout=60)
    assert (lost.returncode, wrong.returncode) == (5, 1)
    assert "cannot be read" in log
