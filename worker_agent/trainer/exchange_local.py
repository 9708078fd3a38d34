"""A coordinator in this process, as the control plane is one: for tests, training alone and benchmarks.

Invariant: what it answers depends on its state and its clock only, and it decides in member order, so the same roster
gives the same rounds. One lock guards all of it; a change wakes whoever pauses.

Rounds. Round 0 opens once `expected` members are ready. A later one opens with the seal of the one before, for all
members that are there. It is sealed when each of its members has submitted or left; or when the quorum has and the
grace is over; or at its deadline with what is there. Who joins in between takes part from the next round on.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worker_agent.protocol import (
    AppliedRequest,
    BlobRef,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    Manifest,
    ManifestEntry,
    PollReply,
    PollRequest,
    Refusal,
    RoundOrder,
    RunSpec,
    SnapshotRequest,
    SubmitReply,
    SubmitRequest,
)
from worker_agent.trainer.checks import fault, judge
from worker_agent.trainer.errors import BlobMissing, Gone, StaleGeneration
from worker_agent.trainer.exchange import digest_of_file

StepsFor = Callable[[str, int], int]
"""(member id, round) -> inner steps of that member."""


@dataclass
class _Member:
    id: str
    generation: int
    instance: str | None = None
    state_round: int = -1
    left: bool = True
    ended: bool = False


@dataclass
class _Round:
    number: int
    opened_ms: int
    deadline_ms: int
    tokens_before: int
    orders: dict[str, RoundOrder]
    submissions: dict[str, SubmitRequest] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    quorum_ms: int | None = None


@dataclass
class RoundRecord:
    """What a sealed round came to; the figures of S_{round + 1} arrive when a member has evaluated it."""

    round: int
    members: list[str]
    tokens: int
    tokens_after: int
    train_loss_nats: float
    bytes_sent: int  # payloads of the round, all members
    sealed_ms: int
    state_digest: str | None = None
    heldout_bits_per_byte: float | None = None


class LocalCoordinator:
    def __init__(
        self,
        run: RunSpec,
        store: Path,
        *,
        expected: int = 1,
        steps_for: StepsFor | None = None,
        evaluate_every: int = 1,
        clock_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        self.run = run
        self.store = store
        self.manifests: list[Manifest] = []
        self.records: list[RoundRecord] = []
        self.digests: dict[int, Counter[str]] = {}
        self.heldout: dict[int, float] = {}
        self.snapshots: dict[int, SnapshotRequest] = {}
        self.reports: list[AppliedRequest] = []
        self.changed = threading.Condition()
        self.version = 0
        self._expected = expected
        self._steps_for = steps_for or (lambda _member, _round: run.sync.inner_steps)
        self._evaluate_every = evaluate_every
        self._clock_ms = clock_ms
        self._on_round = on_round
        self._members: dict[str, _Member] = {}
        self._round: _Round | None = None
        self._data_cursor = 0
        store.mkdir(parents=True, exist_ok=True)

    # --------------------------------------------------------------------------------------------- the outside view

    def admit(self, member_id: str) -> LocalExchange:
        """A place in the run, or the next generation of it: the holder before is fenced off."""
        with self.changed:
            member = self._members.setdefault(member_id, _Member(member_id, generation=0))
            member.generation += 1
            member.instance = None
            self._wake()
            return LocalExchange(
                self, member_id, generation=member.generation, instance=f"{member_id}.{member.generation}"
            )

    def lose(self, member_id: str) -> None:
        """Its lease ran out: it is no longer waited for."""
        with self.changed:
            self._members[member_id].left = True
            self._tick()
            self._wake()

    def end(self, member_id: str) -> None:
        """Its assignment is over: its next call is answered with Gone."""
        self._members[member_id].ended = True
        self.lose(member_id)

    def tick(self) -> None:
        """Look at the clock: deadlines pass without anybody calling."""
        with self.changed:
            self._tick()

    @property
    def tokens(self) -> int:
        return sum(manifest.tokens for manifest in self.manifests)

    @property
    def finished(self) -> bool:
        return self.tokens >= self.run.tokens

    # --------------------------------------------------------------------------------------------- a member's calls

    def join(self, member_id: str, request: JoinRequest) -> JoinReply:
        with self.changed:
            member = self._recognise(member_id, request.generation)
            member.instance, member.left, member.state_round = request.instance, False, -1
            base = max(self.snapshots, default=0)
            snapshot = self.snapshots.get(base)
            self._wake()
            return JoinReply(
                member_id=member_id,
                run=self.run,
                server_time_ms=self._clock_ms(),
                snapshot=snapshot.blob if snapshot else None,
                snapshot_round=base,
                snapshot_state_digest=snapshot.state_digest if snapshot else None,
                manifests=self.manifests[base:],
            )

    def poll(self, member_id: str, request: PollRequest) -> PollReply:
        with self.changed:
            member = self._recognise(member_id, request.generation, request.instance)
            member.state_round = request.state_round
            self._tick()
            return self._answer(member, request)

    def submit(self, member_id: str, request: SubmitRequest) -> SubmitReply:
        with self.changed:
            self._recognise(member_id, request.generation, request.instance)
            self._tick()
            current = self._round
            if current is None or request.round != current.number or member_id not in current.orders:
                return SubmitReply(accepted=False, reason="late")
            if member_id not in current.submissions:
                reason = self._fault(request)
                if reason is not None:
                    current.refused[member_id] = reason
                    self._tick()
                    return SubmitReply(accepted=False, reason=reason)
                current.refused.pop(member_id, None)
                current.submissions[member_id] = request
                self._wake()
            self._tick()
            return SubmitReply(accepted=True)

    def applied(self, member_id: str, request: AppliedRequest) -> None:
        with self.changed:
            self._recognise(member_id, request.generation, request.instance)
            self.reports.append(request)
            self.digests.setdefault(request.state_round, Counter())[request.state_digest] += 1
            record = self.records[request.state_round - 1] if request.state_round > 0 else None
            if request.heldout_bits_per_byte is not None:
                self.heldout[request.state_round] = request.heldout_bits_per_byte
            if record is not None:
                record.state_digest = request.state_digest
                if request.heldout_bits_per_byte is not None and record.heldout_bits_per_byte is None:
                    record.heldout_bits_per_byte = request.heldout_bits_per_byte
                    self._tell(record)
            self._wake()

    def snapshot(self, member_id: str, request: SnapshotRequest) -> None:
        with self.changed:
            self._recognise(member_id, request.generation, request.instance)
            self.snapshots[request.state_round] = request

    def leave(self, member_id: str, request: LeaveRequest) -> None:
        with self.changed:
            member = self._recognise(member_id, request.generation, request.instance)
            member.left = True
            self._tick()
            self._wake()

    def put_blob(self, path: Path) -> BlobRef:
        ref = digest_of_file(path)
        target = self.store / ref.digest
        if not target.exists():
            shutil.copyfile(path, target)
        return ref

    def blob(self, digest: str) -> Path:
        path = self.store / digest
        if not path.exists():
            raise BlobMissing(f"the store has no blob {digest}")
        return path

    # ------------------------------------------------------------------------------------------------------- inside

    def _recognise(self, member_id: str, generation: int, instance: str | None = None) -> _Member:
        member = self._members[member_id]
        if member.ended:
            raise Gone("the assignment has ended")
        if generation != member.generation or (instance is not None and instance != member.instance):
            raise StaleGeneration("another process holds this member's place")
        return member

    def _answer(self, member: _Member, request: PollRequest) -> PollReply:
        now = self._clock_ms()
        held, sealed = request.state_round, len(self.manifests)
        if held > sealed or not self._agrees(held, request.state_digest):
            return PollReply(command="resync", server_time_ms=now, reason="the state held is not the run's")
        if held < sealed:
            return PollReply(command="apply", server_time_ms=now, manifest=self.manifests[held])
        if self.finished:
            return PollReply(command="stop" if request.phase == "final" else "finish", server_time_ms=now)
        if self._round is None:
            self._open_if_ready()
        order = self._round.orders.get(member.id) if self._round else None
        done = self._round is None or member.id in self._round.submissions or member.id in self._round.refused
        if order is None or done or request.phase == "submitted":
            return PollReply(command="wait", server_time_ms=now)
        return PollReply(command="train", server_time_ms=now, order=order)

    def _agrees(self, round: int, digest: str | None) -> bool:
        """With the digest most members have reported of this state; with none reported there is nothing to say."""
        known = self.digests.get(round)
        return digest is None or not known or known[digest] == max(known.values())

    def _present(self) -> list[str]:
        return sorted(member.id for member in self._members.values() if not member.left)

    def _open_if_ready(self) -> None:
        present = [self._members[member_id] for member_id in self._present()]
        ready = [member.id for member in present if member.state_round == len(self.manifests)]
        if len(ready) >= (self._expected if not self.manifests else 1):
            self._open(ready)

    def _open(self, roster: Sequence[str]) -> None:
        number, before, now = len(self.manifests), self.tokens, self._clock_ms()
        step_tokens = self.run.batch_tokens // self.run.model.context * self.run.model.context
        deadline = now + self.run.sync.round_deadline_ms
        fair = -(
            -(self.run.tokens - before) // (step_tokens * max(1, len(roster)))
        )  # no round overshoots the budget by more
        orders = {}
        for slot, member_id in enumerate(roster):
            steps = max(1, min(self._steps_for(member_id, number), fair))
            orders[member_id] = RoundOrder(
                round=number,
                steps=steps,
                tokens_before=before,
                data_slot=slot,
                data_slots=len(roster),
                deadline_ms=deadline,
                data_start=self._data_cursor,
            )
            self._data_cursor += steps * step_tokens
        self._round = _Round(number, now, deadline, before, orders)
        self._wake()

    def _tick(self) -> None:
        current = self._round
        if current is None:
            return
        now, sync = self._clock_ms(), self.run.sync
        awaited = [m for m in current.orders if not self._members[m].left and m not in current.refused]
        missing = [member_id for member_id in awaited if member_id not in current.submissions]
        done = len(current.submissions)
        if done and current.quorum_ms is None and done >= sync.quorum * len(current.orders):
            current.quorum_ms = now
        if (done and not missing) or (
            done and current.quorum_ms is not None and now >= current.quorum_ms + sync.grace_ms
        ):
            self._seal(current)
        elif now >= current.deadline_ms or not awaited:
            if done:
                self._seal(current)
            else:  # nothing to seal: whoever is there now starts it again
                self._round = None

    def _seal(self, current: _Round) -> None:
        clips, reasons = judge(current.submissions)
        absent = {member_id: "not_submitted" for member_id in current.orders if member_id not in clips}
        refused = absent | current.refused | reasons
        kept = {member_id: current.submissions[member_id] for member_id in sorted(clips)}
        entries = [
            ManifestEntry(member_id=member_id, blob=request.blob, weight=request.tokens, clip=clips[member_id])
            for member_id, request in kept.items()
        ]
        state_round = current.number + 1
        tokens = sum(entry.weight for entry in entries)
        here = [entry.member_id for entry in entries if not self._members[entry.member_id].left]
        duty = here[:1]
        last = current.tokens_before + tokens >= self.run.tokens
        self.manifests.append(
            Manifest(
                round=current.number,
                entries=entries,
                tokens_before=current.tokens_before,
                tokens=tokens,
                refused=[Refusal(member_id=member_id, reason=reason) for member_id, reason in sorted(refused.items())],
                base_state_digest=next(iter(kept.values())).base_state_digest if kept else None,
                evaluate=duty if state_round % self._evaluate_every == 0 and not last else [],
                snapshot_by=duty[0] if duty and state_round % self.run.sync.snapshot_every == 0 and not last else None,
            )
        )
        losses = [(request.tokens, request.train_loss_nats) for request in kept.values()]
        self.records.append(
            RoundRecord(
                round=current.number,
                members=[entry.member_id for entry in entries],
                tokens=tokens,
                tokens_after=current.tokens_before + tokens,
                train_loss_nats=sum(weight * loss for weight, loss in losses) / max(1, tokens),
                bytes_sent=sum(request.blob.size_bytes for request in current.submissions.values()),
                sealed_ms=self._clock_ms(),
            )
        )
        self._round = None
        if not self.finished:
            roster = self._present()
            if roster:
                self._open(roster)
        if self._evaluate_every > 1 and state_round % self._evaluate_every:
            self._tell(self.records[-1])
        self._wake()

    def _fault(self, request: SubmitRequest) -> str | None:
        """Before its bytes can reach anybody else, here as on the control plane."""
        try:
            payload = self.blob(request.blob.digest).read_bytes()
        except BlobMissing:
            return "digest"
        return fault(payload, request)

    def _tell(self, record: RoundRecord) -> None:
        if self._on_round is not None:
            self._on_round(record)

    def _wake(self) -> None:
        self.version += 1
        self.changed.notify_all()


class LocalExchange:
    """One member's end of a LocalCoordinator."""

    def __init__(self, coordinator: LocalCoordinator, member_id: str, *, generation: int, instance: str) -> None:
        self.generation = generation
        self.instance = instance
        self._coordinator = coordinator
        self._member_id = member_id
        self._seen = -1
        self._interrupted = False

    def join(self, request: JoinRequest) -> JoinReply:
        return self._coordinator.join(self._member_id, request)

    def poll(self, request: PollRequest) -> PollReply:
        self._seen = self._coordinator.version
        return self._coordinator.poll(self._member_id, request)

    def put_blob(self, path: Path) -> BlobRef:
        return self._coordinator.put_blob(path)

    def get_blobs(self, digests: Sequence[str], folder: Path) -> dict[str, Path]:
        return {digest: self._coordinator.blob(digest) for digest in digests}

    def submit(self, request: SubmitRequest) -> SubmitReply:
        return self._coordinator.submit(self._member_id, request)

    def applied(self, request: AppliedRequest) -> None:
        self._coordinator.applied(self._member_id, request)

    def snapshot(self, request: SnapshotRequest) -> None:
        self._coordinator.snapshot(self._member_id, request)

    def leave(self, request: LeaveRequest) -> None:
        self._coordinator.leave(self._member_id, request)

    def pause(self, milliseconds: int) -> None:
        """Until something changed since the last poll; the time is only a limit, for what passes with the clock."""
        coordinator = self._coordinator
        with coordinator.changed:
            coordinator.changed.wait_for(
                lambda: self._interrupted or coordinator.version != self._seen, timeout=milliseconds / 1000
            )

    def interrupt(self) -> None:
        self._interrupted = True
        with self._coordinator.changed:
            self._coordinator.changed.notify_all()

    def close(self) -> None:
        pass
