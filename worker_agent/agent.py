"""The agent's loop: hear what should run, make it so, meter it, report it.

The main thread never waits for the network: a sync runs on a thread beside it, so that a server that hangs cannot delay
a stop deadline. Everything reported is level-triggered (processes) or cumulative (usage); a lost, repeated or late
exchange changes nothing. Invariants: what the control plane does not list does not run; a lease's work ends at its
deadline by the server's clock even when cut off; an agent that ends by a signal leaves no process behind, one that is
killed leaves its trainers alive for the next agent to take over.
"""

from __future__ import annotations

import os
import random
import secrets
import select
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType

from worker_agent import hardware
from worker_agent.client import BACKOFF_CAP_S, BACKOFF_FIRST_S, Client, backoff_s
from worker_agent.clock import ServerClock, kernel_boot_id, monotonic_ms, wall_ms
from worker_agent.errors import (
    EXIT_OK,
    AgentError,
    Gone,
    ProtocolTooOld,
    Revoked,
    ServerUnreachable,
    Unauthorised,
)
from worker_agent.launch import Launcher
from worker_agent.meter import Meter
from worker_agent.protocol import (
    PROTOCOL_VERSION,
    Assignment,
    HostFacts,
    SyncReply,
    SyncRequest,
)
from worker_agent.reconcile import (
    GENTLE_GRACE_MS,
    Forget,
    Kill,
    Start,
    Stop,
    reconcile,
)
from worker_agent.spool import Spool
from worker_agent.state import Home, Identity, Memory
from worker_agent.workers import Workers, printable

TICK_MS = 250
# The server counts silence in its own intervals: however long it was away, it is called again within so many of them.
_MISSED_BEATS_MAX = 3
_CLOCK_SAVE_MS = 200  # an offset that moved less is not worth a write
_MEMORY_SAVE_MS = 60_000
_DRAIN_LIMIT_MS = GENTLE_GRACE_MS + 5_000
_KEEP_COUNTER_MS = 7 * 86_400_000  # after the deadline: late usage may still be asked for


@dataclass(frozen=True)
class _Synced:
    reply: SyncReply
    used_previous: bool
    sent_ms: int
    received_ms: int
    request: SyncRequest


@dataclass
class _Link:
    """The state of the conversation with the control plane."""

    next_at_ms: int = 0
    beat: int = 0
    failures: int = 0
    in_flight: Future[_Synced] | None = None
    heard: bool = False  # since this process started
    facts_sent: HostFacts | None = None
    want_facts: bool = True
    first_failure_ms: int | None = None
    soon: bool = False
    last_sent_ms: int = field(default=-(10**9))
    every_ms: int = 5_000  # until the server has said


class Agent:
    """`run()` until a signal or a refusal; returns the exit code. The caller holds the home's lock."""

    def __init__(
        self,
        home: Home,
        client: Client,
        launcher: Launcher,
        *,
        say: Callable[[str], None],
        facts: Callable[[], HostFacts],
        device: str = "auto",
        rng: random.Random | None = None,
    ) -> None:
        self._home = home
        self._client = client
        self._say = say
        self._facts = facts
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._identity: Identity = home.load_identity()
        self._kernel_boot = kernel_boot_id()
        self._boot_id = secrets.token_hex(8)
        self._memory = home.load_memory()
        same_boot = bool(self._kernel_boot) and self._memory.kernel_boot_id == self._kernel_boot
        self._clock = ServerClock(self._memory.server_minus_monotonic_ms if same_boot else None)
        self._desired: list[Assignment] = self._memory.assignments if same_boot else []
        self._spool = Spool(home.spool_path, self._identity.epoch)
        self._meter = Meter(self._spool, self._kernel_boot)
        self._workers = Workers(home, launcher, server_url=self._identity.server_url, device=device, say=say)
        self._link = _Link()
        self._signals = 0
        self._draining_since_ms: int | None = None
        self._ending: AgentError | None = None
        self._spool_problem = ""
        self._server_message = ""
        self._memory_saved_ms = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)

    # ------------------------------------------------------------------------------------------------ life

    def run(self) -> int:
        old = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        threads = ThreadPoolExecutor(1, thread_name_prefix="sync")
        try:
            self._say(
                f"agent {self._identity.agent_id} of {self._identity.island_name} started, epoch {self._identity.epoch}"
            )
            self._adopt()
            while True:
                now = monotonic_ms()
                self._take_reply(now)
                self._tick(now)
                if self._is_over(now):
                    return self._finish(threads)
                self._maybe_sync(now, threads)
                self._wait(now)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for number, handler in old.items():
                signal.signal(number, handler)
            self._client.close()
            os.close(self._wake_read)
            # The write end stays open until the process ends: a sync still in flight may want to wake us.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Only a flag and a byte: a handler may interrupt any line, also one that holds a lock."""
        self._signals += 1
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            return  # full: it will wake anyway

    def _wait(self, now: int) -> None:
        until = self._link.next_at_ms if self._link.in_flight is None else now + 60_000
        if self._desired or self._workers.any_alive or self._stopping:
            until = min(until, now + TICK_MS)
        select.select([self._wake_read], [], [], max(0, until - now) / 1000)
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return

    @property
    def _stopping(self) -> bool:
        return self._draining_since_ms is not None or self._ending is not None

    def _is_over(self, now: int) -> bool:
        return self._stopping and not self._workers.any_alive

    def _finish(self, threads: ThreadPoolExecutor) -> int:
        """No process left. Tell the last usage, or say that it waits on the disk."""
        self._meter.record(monotonic_ms(), self._observed_ms())
        self._spool.flush()
        self._workers.disown_stopped({assignment.id for assignment in self._desired if assignment.drain})
        if self._ending is not None:
            self._say(f"stopped: {self._ending}")
            return self._ending.exit_code
        if self._link.in_flight is not None:
            self._link.in_flight.cancel()
        try:
            synced = threads.submit(
                self._exchange, self._request(), self._identity, 1 if self._signals > 1 else 3
            ).result()
            self._accept(synced)
            self._say("drained: all work stopped, usage reported")
        except AgentError as error:
            waiting = len(self._spool.pending())
            self._say(f"drained: all work stopped; {waiting} usage records wait in {self._home.spool_path}: {error}")
        return EXIT_OK

    # ------------------------------------------------------------------------------------------------ the network

    def _maybe_sync(self, now: int, threads: ThreadPoolExecutor) -> None:
        link = self._link
        if self._ending is not None or link.in_flight is not None:
            return
        if link.soon and link.failures == 0 and now - link.last_sent_ms >= 1000:
            link.next_at_ms = min(link.next_at_ms, now)
        if now < link.next_at_ms:
            return
        link.soon = False
        link.last_sent_ms = now
        self._meter.record(now, self._observed_ms())
        self._report_spool_problem()
        future = threads.submit(self._exchange, self._request(), self._identity, 1)
        link.in_flight = future
        future.add_done_callback(lambda _: self._wake())

    def _request(self) -> SyncRequest:
        link = self._link
        link.beat += 1
        facts = None
        if link.want_facts or link.beat % 20 == 0:
            read = self._facts()
            if link.want_facts or hardware.changed(link.facts_sent, read):
                facts = read
        return SyncRequest(
            protocol=PROTOCOL_VERSION,
            epoch=self._identity.epoch,
            boot_id=self._boot_id,
            beat=link.beat,
            agent_time_ms=wall_ms(),
            draining=self._draining_since_ms is not None,
            facts=facts,
            processes=self._workers.reports(),
            usage=self._spool.pending(),
        )

    def _exchange(self, request: SyncRequest, identity: Identity, attempts: int) -> _Synced:
        """On the thread beside. A credential just rotated may be refused if the server never committed it: the previous
        one is still good then."""
        sent = monotonic_ms()
        try:
            reply, used_previous = self._client.sync(request, identity.credential, attempts=attempts), False
        except Unauthorised as error:
            if identity.previous_credential is None or isinstance(error, Revoked | Gone):
                raise
            sent = monotonic_ms()
            reply, used_previous = self._client.sync(request, identity.previous_credential, attempts=attempts), True
        return _Synced(reply, used_previous, sent, monotonic_ms(), request)

    def _take_reply(self, now: int) -> None:
        link = self._link
        if link.in_flight is None or not link.in_flight.done():
            return
        future, link.in_flight = link.in_flight, None
        try:
            synced = future.result()
        except (Unauthorised, ProtocolTooOld) as error:
            self._ending = error
            self._desired = []
            self._say(f"stopping all work: {error}")
        except AgentError as error:
            link.failures += 1
            asked = error.retry_after_s if isinstance(error, ServerUnreachable) else None
            cap_s = min(BACKOFF_CAP_S, max(BACKOFF_FIRST_S, _MISSED_BEATS_MAX * link.every_ms / 1000))
            wait = backoff_s(link.failures, self._rng.random(), asked, cap_s=cap_s)
            link.next_at_ms = now + int(wait * 1000)
            if link.failures == 1:
                link.first_failure_ms = now
                self._say(f"server away, work goes on to its deadlines: {error}")
        else:
            if link.failures:
                away = (now - (link.first_failure_ms or now)) / 1000
                self._say(f"server back after {away:.0f} s")
            link.failures = 0
            self._accept(synced)
            link.every_ms = max(synced.reply.next_sync_ms, 100)
            jitter = 0.9 + 0.2 * self._rng.random()
            link.next_at_ms = now + int(link.every_ms * jitter)

    def _accept(self, synced: _Synced) -> None:
        reply, link = synced.reply, self._link
        self._clock.observe(reply.server_time_ms, synced.sent_ms, synced.received_ms)
        identity = self._identity.fallen_back() if synced.used_previous else self._identity.settled()
        if reply.credential is not None:
            identity = identity.rotated(reply.credential)
        if identity != self._identity:
            try:
                self._home.save_identity(identity)
                self._identity = identity  # stored, then used
            except OSError as error:
                self._say(f"the new credential cannot be stored, the old one is used on: {error}")
        self._spool.acknowledge(reply.usage_acked_seq)
        if synced.request.facts is not None:
            link.facts_sent = synced.request.facts
        link.want_facts = reply.want_facts
        link.heard = True
        if reply.message and reply.message != self._server_message:
            self._say(f"server says: {printable(reply.message)}")
        self._server_message = reply.message
        self._announce(reply.assignments)
        self._desired = reply.assignments
        self._save_memory(reply)
        self._forget_counters(reply.server_time_ms)

    def _announce(self, assignments: list[Assignment]) -> None:
        before = {assignment.id: assignment for assignment in self._desired}
        for assignment in assignments:
            if assignment.id not in before:
                left = max(0, assignment.stop_at_ms - self._observed_ms()) // 1000
                self._say(f"assigned {assignment.id}: {assignment.kind}, {assignment.gpus} GPUs, ends in {left} s")
        for gone in before.keys() - {assignment.id for assignment in assignments}:
            self._say(f"released {gone}: {self._meter.total(gone) / 1000:,.1f} GPU-seconds metered")

    def _save_memory(self, reply: SyncReply) -> None:
        now = monotonic_ms()
        memory = Memory(
            kernel_boot_id=self._kernel_boot,
            server_minus_monotonic_ms=self._clock.offset_ms,
            last_sync_ms=reply.server_time_ms,
            island_state=reply.island_state,
            assignments=reply.assignments,
        )
        old = self._memory
        moved = abs((old.server_minus_monotonic_ms or 0) - (memory.server_minus_monotonic_ms or 0)) > _CLOCK_SAVE_MS
        same = (old.assignments, old.island_state) == (memory.assignments, memory.island_state)
        if same and not moved and now - self._memory_saved_ms < _MEMORY_SAVE_MS:
            return
        try:
            self._home.save_memory(memory)
        except OSError as error:
            self._say(f"memory of the last sync cannot be written: {error}")
            return
        self._memory, self._memory_saved_ms = memory, now

    def _forget_counters(self, server_ms: int) -> None:
        """Counters of assignments long over; kept a while, because an assignment may come back and must go on
        counting."""
        listed = {assignment.id for assignment in self._desired}
        for assignment_id in self._spool.assignment_ids():
            entry = self._spool.latest(assignment_id)
            if entry is None or assignment_id in listed or assignment_id in self._workers:
                continue
            if server_ms - entry.record.observed_at_ms > _KEEP_COUNTER_MS:
                self._meter.forget(assignment_id)

    # ------------------------------------------------------------------------------------------------ the work

    def _adopt(self) -> None:
        for handle in self._workers.adopt():
            self._meter.adopt(handle.assignment_id, monotonic_ms(), handle.started_monotonic_ms)

    def _tick(self, now: int) -> None:
        if self._signals and self._draining_since_ms is None:
            self._draining_since_ms = now
            self._link.next_at_ms = now
            self._say("draining: no new work, trainers submit and leave (a second signal ends them at once)")
        if self._workers.poll(now):
            self._link.soon = True
        server_ms = self._clock.server_ms(now)
        # Before the first word of the server a memory may keep and stop processes; nothing else is known.
        known = self._link.heard or bool(self._desired) or self._stopping
        if known:
            actions = reconcile(
                self._desired,
                self._workers.actual(),
                server_ms=server_ms,
                monotonic=now,
                may_start=self._link.heard and self._ending is None,
                draining=self._draining_since_ms is not None,
            )
            for action in actions:
                match action:
                    case Start(assignment):
                        self._workers.start(assignment, self._link.facts_sent or self._facts(), now)
                        self._link.soon = True
                    case Stop(assignment_id, reason, grace_ms):
                        self._workers.stop(assignment_id, reason, grace_ms, now)
                    case Kill(assignment_id):
                        self._workers.kill(assignment_id, "did not leave in time")
                    case Forget(assignment_id):
                        self._workers.forget(assignment_id)
        quick = self._signals > 1 or (
            self._draining_since_ms is not None and now - self._draining_since_ms > _DRAIN_LIMIT_MS
        )
        if quick:
            self._workers.kill_all("ended at once")
        self._count(now)

    def _count(self, now: int) -> None:
        offset = self._clock.offset_ms
        served = set()
        for assignment in self._desired:
            worker = self._workers.get(assignment.id)
            begin: int | None = None
            if assignment.kind == "train":
                if worker is None or not worker.alive or worker.generation != assignment.generation:
                    continue
                begin = worker.handle.started_monotonic_ms if worker.handle is not None else None
            elif not self._link.heard:
                continue
            if offset is None:
                continue
            served.add(assignment.id)
            self._meter.count(
                assignment.id,
                now,
                gpus=assignment.gpus,
                start_ms=assignment.start_at_ms - offset,
                stop_ms=assignment.stop_at_ms - offset,
                begin_ms=begin,
            )
        if self._link.heard or offset is not None:
            self._meter.pause_others(served)

    def _observed_ms(self) -> int:
        server = self._clock.server_ms(monotonic_ms())
        return wall_ms() if server is None else server

    def _report_spool_problem(self) -> None:
        if self._spool.problem != self._spool_problem:
            self._say(self._spool.problem or "usage is on disk again")
            self._spool_problem = self._spool.problem


def stamp(seconds: float | None = None) -> str:
    """The time at the head of a line, UTC."""
    return time.strftime("%H:%M:%SZ", time.gmtime(seconds))
