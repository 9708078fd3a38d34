"""One training run in which every process there is gets killed, one after another, and what came of it.

The story is the demo's: people sign up, sell, pay in and submit over REST, agents dial in, trainers train. Only the
middle is this module's own: after each kill it waits for a round that was opened after it to be sealed. Invariant: the
next kill comes only when everything the last one took is seen to be at work again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx
import msgspec
import psycopg

from marketplace.devstack.demo import story as demo
from marketplace.devstack.demo.agents import Cluster
from marketplace.devstack.demo.customer import Customer
from marketplace.devstack.demo.story import Plan, Story
from marketplace.devstack.stack import Stack
from marketplace.fleet.liveness import LOST_AFTER_BEATS
from tests.servers import wait_until
from worker_agent.protocol import PROTOCOL_VERSION, SyncRequest, UsageRecord
from worker_agent.state import Home, Identity

# Rounds of three or four seconds on two cores, and twice as many of them as the kills take.
TOKENS = 6_000_000
SPEC: dict[str, Any] = {**demo.SPEC, "name": "a run that is not left in peace", "tokens": TOKENS}
# Takes no leases: that its silence is noticed shows that beat, broker, worker and database do their work together.
SENTINEL = Plan("sentinel", "l40s-pcie-48g", "NVIDIA L40S", 1, 9_000_000, 100)
TRAINER_LOST, AGENT_LOST, POWER_LOST = (plan.name for plan in demo.PLANS)
FENCED = TRAINER_LOST
ENDED = ("succeeded", "stopped", "cancelled", "failed")
# A round's deadline, the silence after which a member is left out, and a trainer's start on a busy machine.
RECOVERY_LIMIT_S = 75.0
RUN_LIMIT_S = 240.0
CONTROL_PLANE = ("web", "worker", "beat", "valkey", "postgres")
# Half as long again as the silence after which an island counts as lost, where agents call every second.
LONG_S = 1.5 * LOST_AFTER_BEATS
A_LOT_GPU_MS = 10**9


@dataclass(frozen=True)
class Kill:
    """What was killed, in which open round, and what was the last round sealed before the next kill."""

    what: str
    in_round: int
    sealed_round: int
    took_s: float


@dataclass(frozen=True)
class Fenced:
    """What an agent got that runs on a copy of a home whose island was enrolled anew."""

    lease_id: str
    exit_code: int
    said: str
    forged: list[tuple[int, str]]  # status and code of calls with the old credential
    counted_before: tuple[int, int]  # GPU-ms of the old epoch on the lease, and its usage reports
    counted_after: tuple[int, int]
    trainers_before: list[int]
    trainers_after: list[int]


@dataclass
class Ordeal:
    """The run as it was read back from the API at its end."""

    stack: Stack
    story: Story
    seller: Customer
    buyer: Customer
    job_id: str
    kills: list[Kill] = field(default_factory=list)
    fenced: Fenced | None = None
    told_meanwhile: list[tuple[int, str | None, str]] = field(default_factory=list)  # while the database was away
    dark_s: float = 0.0  # how long the cluster without power was off, at least
    job: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    leases: list[dict[str, Any]] = field(default_factory=list)

    @property
    def clusters(self) -> dict[str, Cluster]:
        return self.story.clusters

    # ------------------------------------------------------------------------------------------------- the kills

    def kill_everything(self) -> None:
        names = [plan.name for plan in demo.PLANS]
        self.until(lambda: self.counted(0) >= set(names), "all islands are counted in a round")
        with self.killing("a trainer"):
            self.kill_a_trainer()
        with self.killing("an agent"):
            self.kill_an_agent()
        with self.killing("a whole cluster"):
            self.cut_the_power()
        for service in CONTROL_PLANE:
            with self.killing(service):
                self.kill_service(service)
                if service == "postgres":
                    self.ask_without_database()
                if service in ("worker", "beat", "valkey"):
                    self.sentinel_is_watched()
        with self.killing("web, for long"):
            self.hear_nobody_for_long()
        with self.killing("the whole control plane"):
            self.kill_the_control_plane()
        with self.killing("an agent, for another in its place"):
            self.fenced = self.enrol_another()

    @contextmanager
    def killing(self, what: str) -> Iterator[None]:
        started, sealed = time.monotonic(), self.sealed()
        yield
        # The open round may have had all it needed; the one after it was worked on by what is left and what is back.
        self.until(lambda: self.sealed() >= sealed + 2, f"rounds are sealed after {what} was killed")
        self.kills.append(Kill(what, sealed, self.sealed() - 1, time.monotonic() - started))

    def kill_a_trainer(self) -> None:
        cluster = self.clusters[TRAINER_LOST]
        sealed, killed = self.sealed(), cluster.kill_trainers()
        assert killed
        self.until(lambda: bool(set(cluster.trainer_pids()) - set(killed)), "the agent starts another trainer")
        self.counts_again(TRAINER_LOST, sealed)

    def kill_an_agent(self) -> None:
        """Its trainer works on meanwhile, and the agent that comes takes it over."""
        cluster = self.clusters[AGENT_LOST]
        trainers = cluster.trainer_pids()
        assert cluster.kill_agent()
        cluster.run()
        self.until(lambda: "took over" in cluster.said(), "the agent takes its trainer over")
        sealed, delivered = self.sealed(), self.delivered_gpu_ms(AGENT_LOST)
        self.counts_again(AGENT_LOST, sealed)
        self.until(lambda: self.delivered_gpu_ms(AGENT_LOST) > delivered, "the agent meters it")
        assert cluster.trainer_pids() == trainers

    def cut_the_power(self) -> None:
        """For long enough to be noticed, not to be lost; the round goes on without it."""
        cluster = self.clusters[POWER_LOST]
        sealed, killed = self.sealed(), cluster.pull_the_plug()
        assert len(killed) == 2
        went_dark = time.monotonic()
        self.until(lambda: self.story.island(self.seller, POWER_LOST)["state"] == "suspect", "its silence is noticed")
        self.dark_s = time.monotonic() - went_dark
        cluster.run()
        self.counts_again(POWER_LOST, sealed)

    def kill_service(self, name: str) -> None:
        pid = self.stack.kill(name)
        self.stack.wait_ready(name)
        assert self.stack.pid(name) not in {None, pid}

    def ask_without_database(self) -> None:
        """What a customer and a person are told meanwhile."""
        self.stack.kill("postgres", revive=False)
        for path in ("api/v1/balance", "market"):
            answer = httpx.get(f"{self.stack.web_url}/{path}", headers=self.buyer.headers, timeout=30, trust_env=False)
            self.told_meanwhile.append((answer.status_code, answer.headers.get("Retry-After"), answer.text))
        self.stack.start("postgres")

    def kill_the_control_plane(self) -> None:
        """All of it in one moment, as with the machine it runs on."""
        for service in CONTROL_PLANE:
            self.stack.kill(service)
        for service in CONTROL_PLANE:
            self.stack.wait_ready(service)
        self.sentinel_is_watched()

    def hear_nobody_for_long(self) -> None:
        """The server is away for longer than an island may be silent: that is no island's fault."""
        sealed = self.sealed()
        self.stack.kill("web", revive=False)
        silence = "SELECT EXTRACT(EPOCH FROM clock_timestamp() - max(last_seen_at)) FROM fleet_agent"
        wait_until(lambda: self.query(silence)[0][0] > LONG_S, limit_s=2 * LONG_S, what="nobody is heard", every_s=0.5)
        self.stack.start("web")
        for name in (TRAINER_LOST, AGENT_LOST, POWER_LOST):
            self.counts_again(name, sealed)

    def sentinel_is_watched(self) -> None:
        pid = self.clusters[SENTINEL.name].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        self.until(lambda: self.story.island(self.seller, SENTINEL.name)["state"] != "online", "silence is noticed")
        os.kill(pid, signal.SIGCONT)
        self.until(lambda: self.story.island(self.seller, SENTINEL.name)["state"] == "online", "it is heard again")

    # ------------------------------------------------------------------------------------------- the agent's double

    def enrol_another(self) -> Fenced:
        """An island is enrolled anew, and then the agent of before is started from a copy of its home."""
        cluster = self.clusters[FENCED]
        trainers = cluster.trainer_pids()
        cluster.kill_agent()
        double = self.clusters["double"] = cluster.copied_to(cluster.home.with_name("double"))
        token = self.seller.post(f"islands/{self.story.islands[FENCED]}/join-tokens", {})
        cluster.enrol(token["token"])
        cluster.run()
        lease_id, sealed = self.lease_of(FENCED), self.sealed()
        self.until(lambda: len(self.counters(lease_id)) == 2, "the new agent's usage is counted")
        old = Home(double.home).load_identity()
        before = self.counters(lease_id)[old.epoch], self.reports(old)
        forged = [self.forge(old, lease_id, epoch) for epoch in (old.epoch, old.epoch + 1)]
        double.run()
        self.until(lambda: double.exit_code() is not None, "the double ends")
        code = double.exit_code()
        assert code is not None
        self.counts_again(FENCED, sealed)
        after = self.counters(lease_id)[old.epoch], self.reports(old)
        return Fenced(lease_id, code, double.said(), forged, before, after, trainers, cluster.trainer_pids())

    def forge(self, old: Identity, lease_id: str, epoch: int) -> tuple[int, str]:
        """Claim a fortune with the old credential; what the server says to that."""
        usage = UsageRecord(seq=10**6, assignment_id=lease_id, gpu_ms_total=A_LOT_GPU_MS, observed_at_ms=0)
        request = SyncRequest(
            protocol=PROTOCOL_VERSION, epoch=epoch, boot_id="double", beat=10**6, agent_time_ms=0, usage=[usage]
        )
        answer = httpx.post(
            f"{self.stack.web_url}/api/agent/v1/sync",
            content=msgspec.json.encode(request),
            headers={"Authorization": f"Bearer {old.credential}", "Content-Type": "application/json"},
            timeout=30,
            trust_env=False,
        )
        return answer.status_code, answer.json()["code"]

    def counters(self, lease_id: str) -> dict[int, int]:
        """GPU-ms as the agents counted them, by epoch."""
        return dict(self.query("SELECT epoch, gpu_ms_total FROM billing_metercounter WHERE meter_id = %s", lease_id))

    def heard(self, lease_id: str) -> list[tuple[datetime, int]]:
        """When each usage report of the lease came in, and what all epochs had counted by then, in GPU-ms."""
        rows = self.query(
            """SELECT r.received_at, a.epoch, r.gpu_ms_total FROM fleet_usagereport r
               JOIN fleet_agent a ON a.id = r.agent_id WHERE r.assignment_id = %s ORDER BY r.received_at, r.seq""",
            lease_id,
        )
        highest: dict[int, int] = {}
        told = []
        for received_at, epoch, gpu_ms in rows:
            highest[epoch] = max(gpu_ms, highest.get(epoch, 0))
            told.append((received_at, sum(highest.values())))
        return told

    def reports(self, agent: Identity) -> int:
        ((count,),) = self.query("SELECT count(*) FROM fleet_usagereport WHERE agent_id = %s", agent.agent_id)
        return int(count)

    def query(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.stack.env["DATABASE_URL"]) as connection:
            return connection.execute(statement.encode(), values).fetchall()

    # -------------------------------------------------------------------------------------------------- the end

    def see_it_through(self) -> None:
        """To the last token and the last cent."""
        wait_until(
            lambda: self.buyer.get(f"jobs/{self.job_id}")["state"] in ENDED,
            limit_s=RUN_LIMIT_S,
            what="the job ends",
            every_s=0.5,
        )
        self.story.settle(self.buyer, self.job_id)
        self.job = self.buyer.get(f"jobs/{self.job_id}")
        self.rounds = self.buyer.get(f"jobs/{self.job_id}/metrics")["rounds"]
        self.events = list(self._events())
        self.leases = [self.buyer.get(f"leases/{member['lease_id']}") for member in self.job["members"]]

    def _events(self) -> Iterator[dict[str, Any]]:
        after = 0
        while True:
            page = self.buyer.get(f"jobs/{self.job_id}/events", after=after)
            if not page["results"]:
                return
            yield from page["results"]
            after = page["last_seq"]

    # ------------------------------------------------------------------------------------------- how it stands

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it, but not beyond the end of the run, which must outlive all kills."""

        def holds() -> bool:
            if condition():
                return True
            state = self.buyer.get(f"jobs/{self.job_id}")["state"]
            assert state not in ENDED, f"the run {state}, so this was never seen: {what}; TOKENS may be too few here"
            return False

        wait_until(holds, limit_s=RECOVERY_LIMIT_S, what=what, every_s=0.2)

    def sealed(self) -> int:
        return int(self.buyer.get(f"jobs/{self.job_id}")["rounds_sealed"])

    def counted(self, first: int) -> set[str]:
        """Islands that brought something to a sealed round, from round `first` on."""
        rounds = self.buyer.get(f"jobs/{self.job_id}/metrics", after_round=first - 1)["rounds"]
        return {seat["island_name"] for each in rounds for seat in each["seats"] if seat["accepted"]}

    def counts_again(self, name: str, in_round: int) -> None:
        """It brings something to a round that was opened after `in_round`."""
        self.until(lambda: name in self.counted(in_round + 1), f"{name} is counted again")

    def lease_of(self, name: str) -> str:
        members = self.buyer.get(f"jobs/{self.job_id}")["members"]
        (found,) = (each["lease_id"] for each in members if each["island_name"] == name and each["gone_at"] is None)
        return str(found)

    def delivered_gpu_ms(self, name: str) -> int:
        return int(self.buyer.get(f"leases/{self.lease_of(name)}")["delivered_gpu_ms"])


def begin(stack: Stack, story: Story) -> Ordeal:
    """Islands, money and a job that trains."""
    story.catalogue()
    seller, buyer = story.sign_up(demo.SELLER, "Northern Islands"), story.sign_up(demo.BUYER, "Small Model Lab")
    story.sell(seller, (SENTINEL,))
    seller.patch(f"islands/{story.islands[SENTINEL.name]}", {"listed": False})
    story.sell(seller, demo.PLANS)
    story.top_up(buyer)
    return Ordeal(stack, story, seller, buyer, buyer.post("jobs", SPEC)["id"])
