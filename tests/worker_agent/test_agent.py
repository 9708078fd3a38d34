"""The agent as a real process against a control plane over HTTP, with real child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import wait_until
from tests.worker_agent.control_plane import ControlPlane, running_control_plane
from worker_agent import cli
from worker_agent.doctor import listening_ports
from worker_agent.launch.local import LocalLauncher, is_alive, start_ticks
from worker_agent.state import Home

ROOT = Path(__file__).resolve().parents[2]


class Bench:
    """One home, one control plane, and the agents started on them."""

    def __init__(self, home: Path, plane: ControlPlane, url: str) -> None:
        self.home, self.plane, self.url = Home(home), plane, url
        self.agents: list[subprocess.Popen[bytes]] = []
        self.log = home.parent / "agent.log"

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "tests.worker_agent.run_agent", str(self.home.path)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self.agents.append(agent)
        return agent

    def wait_running(self, key: str) -> int:
        self.plane.wait_for(lambda: self.plane.pid_of(key), f"{key} reported as running")
        pid = self.plane.pid_of(key)
        assert pid is not None
        return pid

    def said(self) -> str:
        return self.log.read_text()

    def clear(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        launcher = LocalLauncher()
        for handle in launcher.adopt(self.home.work_path):
            launcher.stop(handle, force=True)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running_control_plane() as (plane, url):
        bench = Bench(tmp_path / "home", plane, url)
        code = cli.main(
            ["enroll", "--server", url, "--token", "join-1", "--home", str(bench.home.path), "--simulate-gpus", "4"]
        )
        assert code == 0
        try:
            yield bench
        finally:
            bench.clear()


def gone(pid: int) -> bool:
    return start_ticks(pid) is None


def test_the_agent_runs_what_is_assigned_and_stops_what_is_not_listed(bench: Bench) -> None:
    bench.plane.assign("a1")
    bench.start()
    pid = bench.wait_running("a1")
    assert bench.plane.syncs[0].facts is not None
    assert bench.plane.syncs[0].facts.gpu_source == "simulated"
    bench.plane.assignments = []
    wait_until(lambda: gone(pid), limit_s=10, what="the trainer has ended")
    bench.plane.wait_for(lambda: bench.plane.last().processes == [], "its report is dropped")


def test_the_agent_listens_on_nothing(bench: Bench) -> None:
    bench.plane.assign("a1")
    agent = bench.start()
    bench.wait_running("a1")
    assert listening_ports(agent.pid) == []
    assert listening_ports(os.getpid()) != []  # the control plane in this process: the look finds what is there


def test_usage_replayed_or_with_its_reply_lost_is_counted_once(bench: Bench) -> None:
    bench.plane.assign("a1", gpus=2)
    bench.start()
    bench.wait_running("a1")
    begin = time.monotonic()
    for fault in ("lose_reply", "duplicate", "500", "lose_reply"):
        bench.plane.faults.append(fault)
        bench.plane.wait_for(lambda: not bench.plane.faults, f"{fault} met")
        bench.plane.wait_syncs(1)
    bench.plane.wait_for(lambda: bench.plane.usage.get("a1", 0) > 0, "usage told")
    first = bench.plane.syncs[0].agent_time_ms
    assert bench.plane.usage["a1"] <= 2 * (bench.plane.now_ms() - first)
    assert bench.plane.usage["a1"] >= 2 * 1000 * (time.monotonic() - begin) * 0.4


def test_a_killed_agent_takes_over_the_same_process_and_usage_goes_on(bench: Bench) -> None:
    bench.plane.assign("a1", gpus=3)
    agent = bench.start()
    pid = bench.wait_running("a1")
    bench.plane.wait_for(lambda: bench.plane.usage.get("a1", 0) > 300, "some usage")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert not gone(pid)
    before, syncs = dict(bench.plane.usage), len(bench.plane.syncs)
    bench.start()
    bench.plane.wait_for(lambda: len(bench.plane.syncs) > syncs + 2, "the second agent syncs")
    assert bench.wait_running("a1") == pid
    bench.plane.wait_for(lambda: bench.plane.usage["a1"] > before["a1"], "usage rises on")
    handle = next(iter(LocalLauncher().adopt(bench.home.work_path)))
    assert is_alive(handle)
    lived_ms = time.monotonic_ns() // 1_000_000 - handle.started_monotonic_ms
    assert bench.plane.usage["a1"] <= 3 * lived_ms
    assert bench.plane.usage["a1"] >= 3 * (lived_ms - 1500)


def test_cut_off_from_the_server_the_work_ends_at_its_deadline(bench: Bench) -> None:
    bench.plane.server_skew_ms = 3_600_000  # the server's clock is an hour ahead: only its own time counts
    bench.plane.assign("a1", seconds=3, gpus=1)
    bench.start()
    pid = bench.wait_running("a1")
    bench.plane.down = True
    wait_until(lambda: gone(pid), limit_s=10, what="the trainer has ended by itself")
    assert bench.plane.now_ms() >= bench.plane.assignments[0].stop_at_ms - 50
    bench.plane.down = False
    bench.plane.wait_for(lambda: bench.plane.usage.get("a1", 0) > 2000, "usage reported on return")
    assert bench.plane.usage["a1"] <= 3000


def test_a_server_that_was_away_is_called_within_a_few_of_its_intervals(bench: Bench) -> None:
    """Left to grow, the pauses would add up to most of a minute, in which the island counts as lost."""
    bench.start()
    bench.plane.wait_syncs()
    bench.plane.faults = ["500"] * 8
    bench.plane.wait_for(lambda: not bench.plane.faults, "eight calls that fail", limit_s=10)
    bench.plane.wait_for(lambda: "server back" in bench.said(), "it is back")


def test_an_agent_restarted_while_cut_off_still_keeps_the_deadline(bench: Bench) -> None:
    bench.plane.assign("a1", seconds=4)
    agent = bench.start()
    pid = bench.wait_running("a1")
    bench.plane.down = True
    agent.kill()
    agent.wait()
    bench.start()
    wait_until(lambda: gone(pid), limit_s=12, what="the trainer has ended by itself")


def test_sigterm_drains_and_the_last_usage_is_told(bench: Bench) -> None:
    bench.plane.assign("a1")
    agent = bench.start()
    pid = bench.wait_running("a1")
    agent.terminate()
    assert agent.wait(15) == 0
    assert gone(pid)
    last = bench.plane.last()
    assert last.draining
    assert [report.state for report in last.processes] == ["exited"]
    assert bench.plane.usage["a1"] > 0
    bench.start()  # the drain was the agent's end and not the work's
    bench.plane.wait_for(lambda: bench.plane.pid_of("a1") not in (None, pid), "the work starts again")


def test_a_second_signal_ends_even_a_stubborn_trainer_at_once(bench: Bench) -> None:
    bench.plane.assign("a1", "stubborn-1")
    agent = bench.start()
    pid = bench.wait_running("a1")
    wait_until(
        lambda: "training" in (bench.home.workdir("a1") / "status.json").read_text(), limit_s=5, what="it is at work"
    )
    agent.terminate()
    bench.plane.wait_for(lambda: bench.plane.last().draining, "draining is told")
    agent.terminate()
    assert agent.wait(10) == 0
    assert gone(pid)


def test_a_drained_assignment_is_not_started_again(bench: Bench) -> None:
    bench.plane.assign("a1")
    bench.start()
    pid = bench.wait_running("a1")
    bench.plane.change("a1", drain=True)
    wait_until(lambda: gone(pid), limit_s=10, what="the trainer has left")
    bench.plane.wait_syncs(3)
    assert [(r.state, r.exit_code) for r in bench.plane.last().processes] == [("exited", 0)]


def test_a_new_generation_replaces_the_process(bench: Bench) -> None:
    bench.plane.assign("a1", generation=1)
    bench.start()
    pid = bench.wait_running("a1")
    bench.plane.assign("a1", generation=2)
    bench.plane.wait_for(lambda: bench.plane.pid_of("a1") not in (None, pid), "another process")
    assert gone(pid)
    assert bench.plane.last().processes[0].generation == 2


def test_revoked_the_agent_stops_all_work_and_says_so(bench: Bench) -> None:
    bench.plane.assign("a1")
    agent = bench.start()
    pid = bench.wait_running("a1")
    bench.plane.revoked = True
    assert agent.wait(15) == 6
    assert gone(pid)
    assert "revoked" in bench.said()


def test_a_failing_trainer_backs_off_and_its_log_is_reported(bench: Bench) -> None:
    bench.plane.assign("a1", "fail-1")
    bench.start()
    bench.plane.wait_for(
        lambda: [r.state for p in bench.plane.syncs[-1:] for r in p.processes] == ["failed"], "failure told"
    )
    report = bench.plane.last().processes[0]
    assert report.exit_code == 1
    assert "no such dataset" in report.message
    assert "no such dataset" in report.log_tail[-1]
    assert bench.said().count("a1 started") <= 2
    assert bench.plane.usage.get("a1", 0) < 2 * 1500


def test_a_reservation_is_metered_without_a_process(bench: Bench) -> None:
    bench.plane.assign("r1", kind="reserve", gpus=4)
    bench.start()
    bench.plane.wait_for(lambda: bench.plane.usage.get("r1", 0) > 400, "usage of the reservation")
    assert bench.plane.last().processes == []


def test_a_rotated_credential_is_stored_then_used(bench: Bench) -> None:
    bench.start()
    bench.plane.wait_syncs(1)
    bench.plane.pending_rotation = "credential-rotated"
    bench.plane.wait_for(lambda: bench.plane.credentials == {"credential-rotated"}, "the new one is seen")
    bench.plane.wait_syncs(2)
    identity = bench.home.load_identity()
    assert (identity.credential, identity.previous_credential) == ("credential-rotated", None)


def test_a_crash_between_storing_and_using_a_credential_leaves_one_that_works(bench: Bench) -> None:
    old = bench.home.load_identity()
    bench.home.save_identity(old.rotated("never-committed-by-the-server"))
    bench.start()
    bench.plane.wait_syncs(2)
    assert bench.home.load_identity() == old


def test_of_two_agents_on_one_home_one_runs(bench: Bench) -> None:
    agents = [bench.start(), bench.start()]
    wait_until(lambda: any(agent.poll() is not None for agent in agents), limit_s=10, what="one gave up")
    bench.plane.wait_syncs(2)
    assert sorted(agent.poll() is None for agent in agents) == [False, True]
    assert {agent.poll() for agent in agents} == {None, 8}


def test_a_join_token_works_once(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["enroll", "--server", bench.url, "--token", "join-1", "--home", str(tmp_path / "other")])
    assert code == 6
    assert "make a new one" in capsys.readouterr().err
