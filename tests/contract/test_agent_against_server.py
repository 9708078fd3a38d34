"""The real agent, as a process, against the real control plane over HTTP: what one promises the other."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from django.db.models import Max
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from marketplace.accounts.access import Actor
from marketplace.core.clock import database_now, to_ms
from marketplace.fleet import hooks, services
from marketplace.fleet.models import Agent, FleetEvent, Island, UsageReport
from tests.marketplace.fleet.build import island, seller
from tests.servers import wait_until
from worker_agent import cli
from worker_agent.launch.local import LocalLauncher, start_ticks
from worker_agent.protocol import Assignment, ProcessReport, TrainOrder
from worker_agent.state import Home

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0

pytestmark = pytest.mark.django_db(transaction=True)


class Desk:
    """Stands where trading and training do: says what the island is to run, and hears of its processes."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self.reports: list[ProcessReport] = []
        self.beats = 0

    def assign(self, key: str, behaviour: str = "run", *, kind: str = "train", gpus: int = 2) -> None:
        now_ms = to_ms(database_now())
        order = TrainOrder(job_id="job", member_id="m", generation=1, member_token=behaviour)
        self.assignments.append(
            Assignment(
                id=key,
                generation=1,
                kind="train" if kind == "train" else "reserve",
                gpus=gpus,
                start_at_ms=now_ms,
                stop_at_ms=now_ms + 60_000,
                train=order if kind == "train" else None,
            )
        )

    def pid_of(self, key: str) -> int | None:
        alive = [r.pid for r in self.reports if r.assignment_id == key and r.state in ("starting", "running")]
        return alive[0] if alive else None

    def asked(self, held: Island, now: datetime) -> list[Assignment]:
        return list(self.assignments)

    def heard(self, agent: Agent, reports: object, now: datetime) -> None:
        self.reports = list(reports)  # type: ignore[call-overload]  # what the hook passes is a sequence
        self.beats += 1


class Link:
    """The network between agent and server: forwards every call, and loses a reply when told to."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.lose = 0
        self.lost = 0
        self.url = ""

    @contextmanager
    def open(self) -> Iterator[None]:
        link = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                kept = {name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]}
                answer = httpx.post(f"{link.target}{self.path}", content=body, headers=kept, timeout=10)
                if link.lose > 0:
                    link.lose, link.lost = link.lose - 1, link.lost + 1
                    self.close_connection = True
                    return
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(answer.content)))
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, format: str, *args: object) -> None:
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()


class Bench:
    """One island, one home, and the agents started on it."""

    def __init__(self, folder: Path, actor: Actor, made: Island, link: Link, desk: Desk) -> None:
        self.home = Home(folder / "home")
        self.log = folder / "agent.log"
        self.actor, self.island, self.link, self.desk = actor, made, link, desk
        self.agents: list[subprocess.Popen[bytes]] = []

    def enrol(self, *more: str) -> int:
        token = services.issue_join_token(self.actor, self.island.id, database_now()).secret
        server = ["--server", self.link.url, "--token", token, "--home", str(self.home.path)]
        return cli.main(["enroll", *server, *(more or ("--simulate-gpus", "4"))])

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "tests.worker_agent.run_agent", str(self.home.path)]
            agent = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self.agents.append(agent)
        return agent

    def state(self) -> str:
        return Island.objects.values_list("state", flat=True).get(pk=self.island.pk)

    def counted(self, key: str) -> int:
        return UsageReport.objects.filter(assignment_id=key).aggregate(top=Max("gpu_ms_total"))["top"] or 0

    def wait_running(self, key: str) -> int:
        wait_until(lambda: self.desk.pid_of(key) is not None, limit_s=LIMIT_S, what=f"{key} runs")
        pid = self.desk.pid_of(key)
        assert pid is not None
        return pid

    def wait_beats(self, more: int) -> None:
        goal = self.desk.beats + more
        wait_until(lambda: self.desk.beats >= goal, limit_s=LIMIT_S, what=f"{more} more beats")

    def clear(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        launcher = LocalLauncher()
        for handle in launcher.adopt(self.home.work_path):
            launcher.stop(handle, force=True)


@pytest.fixture
def bench(
    tmp_path: Path, live_server: LiveServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    settings.FLEET_SYNC_MS = 150
    desk, link = Desk(), Link(live_server.url)
    monkeypatch.setattr(hooks, "_assignments", [*hooks._assignments, desk.asked])
    monkeypatch.setattr(hooks, "_processes", [*hooks._processes, desk.heard])
    actor = seller()
    bench = Bench(tmp_path, actor, island(actor, now=database_now()), link, desk)
    with link.open():
        try:
            yield bench
        finally:
            bench.clear()


def test_an_enrolled_agent_brings_its_island_online_and_serves_what_is_assigned(bench: Bench) -> None:
    assert bench.enrol() == 0
    bench.desk.assign("lse_a")
    bench.start()
    pid = bench.wait_running("lse_a")
    assert bench.state() == "online"
    assert Agent.objects.get().facts["gpu_source"] == "simulated"
    bench.desk.assignments = []
    wait_until(lambda: start_ticks(pid) is None, limit_s=LIMIT_S, what="what is not listed has ended")
    wait_until(lambda: bench.desk.reports == [], limit_s=LIMIT_S, what="its report is dropped")


def test_usage_is_counted_once_across_lost_replies_and_a_killed_agent(bench: Bench) -> None:
    assert bench.enrol() == 0
    bench.desk.assign("lse_a", gpus=3)
    agent = bench.start()
    pid = bench.wait_running("lse_a")
    for _ in range(2):
        bench.link.lose = 1
        wait_until(lambda: bench.link.lose == 0, limit_s=LIMIT_S, what="a reply is lost")
        bench.wait_beats(1)
    wait_until(lambda: bench.counted("lse_a") > 300, limit_s=LIMIT_S, what="some usage")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    before = bench.counted("lse_a")
    bench.start()
    bench.wait_beats(3)
    assert bench.wait_running("lse_a") == pid
    wait_until(lambda: bench.counted("lse_a") > before, limit_s=LIMIT_S, what="usage rises on")
    (handle,) = LocalLauncher().adopt(bench.home.work_path)
    lived_ms = time.monotonic_ns() // 1_000_000 - handle.started_monotonic_ms
    assert 3 * (lived_ms - 2_000) <= bench.counted("lse_a") <= 3 * lived_ms
    rows = UsageReport.objects.filter(assignment_id="lse_a")
    totals = list(rows.order_by("seq").values_list("gpu_ms_total", flat=True))
    assert totals == sorted(totals)
    assert Agent.objects.get().usage_acked_seq == rows.aggregate(top=Max("seq"))["top"]
    assert bench.link.lost == 2


def test_sigterm_drains_the_island_and_the_last_usage_is_told(bench: Bench) -> None:
    assert bench.enrol() == 0
    bench.desk.assign("lse_a")
    agent = bench.start()
    pid = bench.wait_running("lse_a")
    agent.terminate()
    assert agent.wait(LIMIT_S) == 0
    assert start_ticks(pid) is None
    assert bench.state() == "draining"
    assert bench.counted("lse_a") > 0
    assert [report.state for report in bench.desk.reports] == ["exited"]
    bench.start()
    wait_until(lambda: bench.state() == "online", limit_s=LIMIT_S, what="the island is back")


def test_a_revoked_agent_stops_all_work(bench: Bench) -> None:
    assert bench.enrol() == 0
    bench.desk.assign("lse_a")
    agent = bench.start()
    pid = bench.wait_running("lse_a")
    services.revoke_agent(bench.actor, bench.island.id, database_now(), why="the cluster is sold")
    assert agent.wait(LIMIT_S) == 6
    assert start_ticks(pid) is None
    assert "the cluster is sold" in bench.log.read_text()
    assert bench.state() == "registered"


def test_an_agent_enrolled_anew_elsewhere_is_fenced_off(bench: Bench) -> None:
    assert bench.enrol() == 0
    agent = bench.start()
    bench.wait_beats(1)
    bench.home = Home(bench.home.path.with_name("other"))
    assert bench.enrol() == 0
    assert agent.wait(LIMIT_S) == 6
    assert "enrolled anew" in bench.log.read_text()


def test_a_rotated_credential_is_taken_also_when_the_answer_that_brought_it_was_lost(bench: Bench) -> None:
    assert bench.enrol() == 0
    bench.start()
    bench.wait_beats(1)
    first = bench.home.load_identity().credential
    bench.link.lose = 1
    services.rotate_agent(bench.actor, bench.island.id, database_now())
    wait_until(
        lambda: FleetEvent.objects.filter(kind="rotated").exists(), limit_s=LIMIT_S, what="the new credential is seen"
    )
    wait_until(
        lambda: bench.home.load_identity().previous_credential is None, limit_s=LIMIT_S, what="the old one is dropped"
    )
    assert bench.home.load_identity().credential != first


def test_doctor_finds_the_credential_good_and_then_revoked(
    bench: Bench, live_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.link.url = live_server.url  # doctor reads the server's Date, which the link does not carry on
    assert bench.enrol() == 0
    home = ["--home", str(bench.home.path)]
    capsys.readouterr()
    cli.main(["doctor", *home])
    said = capsys.readouterr().out
    assert "the agent API answers (409)" in said
    assert "credential   accepted" in said
    assert Agent.objects.get().last_seen_at is None
    services.revoke_agent(bench.actor, bench.island.id, database_now())
    assert cli.main(["doctor", *home]) == 1
    said = capsys.readouterr().out
    assert "not accepted (401)" in said
    assert "enroll again with a new join token" in said


def test_gpus_that_were_not_registered_are_refused_in_words(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.enrol("--simulate-gpus", "2") == 1
    assert "4 × H100 SXM 80 GB are registered, the agent sees 2 × Simulated GPU" in capsys.readouterr().err
    assert bench.enrol() == 0
