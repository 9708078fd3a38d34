"""The round loop of one member, as the protocol describes it.

Level-triggered: the member says where it stands (the state it holds and its phase), the coordinator says what comes
next; neither relies on what was said before. In order:

 1. join; take the snapshot or the seed's S_0; replay the manifests since: this is S_r.
 2. poll `ready`. `train`: H inner steps from S_r on the order's own windows, watching for a seal or a stop meanwhile
    and keeping back the time it takes to submit before the deadline.
 3. encode S_r minus the parameters, with what earlier rounds left over; upload; submit. Refused or late is no error.
 4. poll `submitted` until the manifest is there; apply it: S_{r+1}, by the same arithmetic on all members.
 5. evaluate and upload S_{r+1} where the manifest says so; report its digest; back to 2.

Invariant: what the member reports is what it holds; a state that differs from the others' is given up, never argued
for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from worker_agent.protocol import (
    AppliedRequest,
    BlobRef,
    JoinRequest,
    LeaveRequest,
    Manifest,
    PollReply,
    PollRequest,
    RoundOrder,
    RunSpec,
    SnapshotRequest,
    SubmitRequest,
)
from worker_agent.trainer import codec
from worker_agent.trainer.errors import (
    BlobMissing,
    Gone,
    PayloadError,
    RequestRefused,
    StaleGeneration,
    StateError,
    TrainerError,
)
from worker_agent.trainer.exchange import Exchange
from worker_agent.trainer.inner import Island, Progress, RoundWork
from worker_agent.trainer.outer import apply_manifest, pseudo_gradient
from worker_agent.trainer.state import OuterState, load_snapshot, save_snapshot, write_atomically
from worker_agent.trainer.status import StatusFile
from worker_agent.trainer.watch import Watch

DRAIN_SHARE = 0.25  # of a round's tokens: with less, a leaver's contribution is not worth its upload
_MAX_RESYNCS = 8  # in a row, without a round between them
_MAX_REFUSALS = 3  # of one round: after that its manifest is waited for, whatever is ordered
_FIRST_SUBMIT_GUESS_MS = 500

Outcome = Literal["finished", "stopped", "drained"]
Phase = Literal["ready", "training", "submitted", "final"]
Assemble = Callable[[RunSpec], Island]
T = TypeVar("T")


@dataclass(frozen=True)
class _Submission:
    """What was sent for a round, until its manifest shows whether it counted."""

    round: int
    blob: BlobRef
    residual: torch.Tensor


class Learner:
    """One member. `assemble` builds its island once the run is known; `stop` asks it to drain; `gate` is held while it
    computes, where several learners share a machine."""

    def __init__(
        self,
        exchange: Exchange,
        assemble: Assemble,
        workdir: Path,
        *,
        status: StatusFile | None = None,
        stop: threading.Event | None = None,
        gate: AbstractContextManager[object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.exchange = exchange
        self.status = status or StatusFile(None)
        self.stop = stop or threading.Event()
        self.state: OuterState | None = None
        self._assemble = assemble
        self._workdir = workdir
        self._blobs = workdir / "blobs"
        self._gate = gate or nullcontext()
        self._monotonic = monotonic
        self._island: Island | None = None
        self._run: RunSpec | None = None
        self._member_id = ""
        self._digest = ""
        self._phase: Phase = "ready"
        self._progress = Progress(steps=0, tokens=0, loss_nats=None, step_ms=None)
        self._residual: torch.Tensor | None = None
        self._submission: _Submission | None = None
        self._submitted_at: float | None = None
        self._submit_ms = _FIRST_SUBMIT_GUESS_MS
        self._resyncs = 0
        self._refusals = 0  # of the round

    # --------------------------------------------------------------------------------------------------------- loop

    def run(self) -> Outcome:
        """Serve the run to its end, a stop, or a drain. The other processes of the island are let go in any case."""
        try:
            return self._serve()
        finally:
            if self._island is not None:
                self._island.stop()

    def _serve(self) -> Outcome:
        self._join()
        while True:
            if self.stop.is_set():
                return self._leave("drain", "drained")
            reply = self.exchange.poll(self._position())
            if reply.command == "stop":
                return self._leave("stop", "finished" if self._phase == "final" else "stopped")
            try:
                self._do(reply)
            except RequestRefused as error:  # a report it takes for wrong: then our view is, so take the run's again
                self._resync(str(error))

    def _do(self, reply: PollReply) -> None:
        if reply.command == "train" and reply.order is not None:
            self._take(reply.order, reply)
        elif reply.command == "apply" and reply.manifest is not None:
            self._advance(reply.manifest)
        elif reply.command == "resync":
            self._resync(reply.reason or "told to")
        elif reply.command == "finish" and self._phase != "final":
            self._finish()
        else:
            if self._phase != "final":
                self.status.write("waiting", round=self._held.round, message=reply.reason)
            self.exchange.pause(reply.next_poll_ms)

    def _position(self) -> PollRequest:
        island, state = self._ready_island, self._held
        return PollRequest(
            generation=self.exchange.generation,
            instance=self.exchange.instance,
            state_round=state.round,
            state_digest=self._digest,
            phase=self._phase,
            steps_done=self._progress.steps,
            tokens_done=self._progress.tokens,
            step_ms=self._progress.step_ms,
            parameters=island.layout.numel,
            layout_digest=island.layout.digest,
        )

    def _leave(self, reason: str, outcome: Outcome) -> Outcome:
        request = LeaveRequest(generation=self.exchange.generation, instance=self.exchange.instance, reason=reason)
        with suppress(Gone, StaleGeneration):  # the place is not ours any more, which is what was asked for
            self.exchange.leave(request)
        self.status.write("done", round=self._held.round, message=outcome)
        return outcome

    # ----------------------------------------------------------------------------------------------------- catch up

    def _join(self) -> None:
        """Take the newest sealed state, whatever was held before."""
        self.status.write("starting" if self._island is None else "catching_up")
        reply = self.exchange.join(
            JoinRequest(
                generation=self.exchange.generation,
                instance=self.exchange.instance,
                device=str(self._island.device) if self._island is not None else "cpu",
                parameters=self._island.layout.numel if self._island is not None else None,
                layout_digest=self._island.layout.digest if self._island is not None else None,
            )
        )
        self._member_id, self._run = reply.member_id, reply.run
        if self._island is None:
            self._island = self._assemble(reply.run)
        self.status.write("catching_up", round=reply.snapshot_round)
        state = OuterState.initial(self._island.layout, self._island.initial)
        if reply.snapshot is not None:
            path = self.exchange.get_blobs([reply.snapshot.digest], self._blobs)[reply.snapshot.digest]
            state = load_snapshot(path)
            if state.layout != self._island.layout:
                raise StateError("the run's snapshot is of another model than the run's specification builds")
            if state.round != reply.snapshot_round or reply.snapshot_state_digest not in (None, state.digest()):
                raise StateError("the run's snapshot is not the state it is said to be")
        for manifest in reply.manifests:
            if manifest.round >= state.round:
                state, _ = self._applied_to(state, manifest)
        self._hold(state)
        self._submission = None

    def _resync(self, reason: str) -> None:
        self._resyncs += 1
        if self._resyncs > _MAX_RESYNCS:
            raise TrainerError(f"gave up after {_MAX_RESYNCS} attempts to take the run's state: {reason}")
        self.status.write("catching_up", round=self._held.round, message=reason)
        if self._resyncs > 1:
            self.exchange.pause(250 * self._resyncs)
        try:
            self._join()
        except (BlobMissing, PayloadError, StateError) as error:
            self.status.write("catching_up", message=str(error))
            self.exchange.pause(250 * self._resyncs)  # the old state is kept; the next poll decides

    def _hold(self, state: OuterState) -> None:
        self.state, self._digest, self._phase = state, state.digest(), "ready"
        self._progress = Progress(steps=0, tokens=0, loss_nats=None, step_ms=self._progress.step_ms)
        self._clear_blobs()

    # -------------------------------------------------------------------------------------------------------- train

    def _take(self, order: RoundOrder, reply: PollReply) -> None:
        """Do the order once. What cannot be done again (this round was submitted) waits for its manifest."""
        if order.round != self._held.round:
            self._resync(f"ordered to train round {order.round} while holding {self._held.round}")
            return
        if self._phase == "submitted" or self._refusals >= _MAX_REFUSALS:
            self.exchange.pause(reply.next_poll_ms)
            return
        if order.round == 0 and order.data_slot == 0:
            self._report(bits=self._evaluate())  # where the run starts from, by one member
        work = self._train(order, reply)
        if work is None:
            return
        if self.stop.is_set() and work.tokens < DRAIN_SHARE * order.steps * self._ready_island.tokens_per_step:
            return
        if work.tokens:
            self._submit(order, work)
        else:
            self.exchange.pause(reply.next_poll_ms)

    def _train(self, order: RoundOrder, reply: PollReply) -> RoundWork | None:
        """None where the order was over before the work was: then the next poll says what is instead."""
        island = self._ready_island
        offset_s = self._monotonic() - reply.server_time_ms / 1000  # the server's clock on ours
        self._phase = "training"
        with self._gate, Watch(self._poll_meanwhile, round=order.round, first_poll_ms=reply.next_poll_ms) as watch:
            island.load(self._held.params)

            def go_on(progress: Progress) -> bool:
                self._progress = progress
                self.status.write(
                    "training",
                    round=order.round,
                    step=progress.steps,
                    steps=order.steps,
                    tokens=progress.tokens,
                    loss_nats=progress.loss_nats,
                )
                latest = watch.latest
                moved = (
                    latest.order.deadline_ms if latest is not None and latest.order is not None else order.deadline_ms
                )
                left_ms = (moved / 1000 + offset_s - self._monotonic()) * 1000
                reserve_ms = 1.5 * self._submit_ms + 1.5 * (progress.step_ms or 0)
                return not (self.stop.is_set() or watch.over or left_ms < reserve_ms)

            work = island.train(order, go_on)
        self._phase = "ready"
        if watch.error is not None:
            raise watch.error
        return None if watch.verdict is not None else work

    def _poll_meanwhile(self) -> PollReply:
        return self.exchange.poll(self._position())

    def _submit(self, order: RoundOrder, work: RoundWork) -> None:
        state, run, island = self._held, self._known_run, self._ready_island
        self.status.write("submitting", round=order.round, step=work.steps, steps=order.steps, loss_nats=work.loss_nats)
        started = self._monotonic()
        header = codec.header_for(
            run.sync.codec,
            numel=island.layout.numel,
            layout_digest=island.layout.digest,
            job_id=run.job_id,
            round=order.round,
            member_id=self._member_id,
            tokens=work.tokens,
        )
        delta = pseudo_gradient(state, island.parameters())
        residual = self._residual if run.sync.error_feedback else None
        payload, decoded, left_over = codec.encode_with_feedback(delta, residual, header)
        encoded = self._monotonic()
        self._blobs.mkdir(parents=True, exist_ok=True)
        path = self._blobs / f"own-{order.round}"
        write_atomically(path, payload)
        blob = self.exchange.put_blob(path)
        path.rename(self._blobs / blob.digest)  # under its digest, so that applying does not fetch it back
        uploaded = self._monotonic()
        self._submission = _Submission(round=order.round, blob=blob, residual=left_over)
        self._submitted_at, self._phase = uploaded, "submitted"
        self._submit_ms = round((uploaded - started) * 1000)
        request = SubmitRequest(
            generation=self.exchange.generation,
            instance=self.exchange.instance,
            round=order.round,
            blob=blob,
            tokens=work.tokens,
            steps=work.steps,
            base_state_digest=self._digest,
            train_loss_nats=work.loss_nats if work.loss_nats is not None else 0.0,
            norm=codec.norm(decoded),
            compute_ms=work.compute_ms,
            encode_ms=round((encoded - started) * 1000),
            upload_ms=round((uploaded - encoded) * 1000),
        )
        try:
            reply = self.exchange.submit(request)
            refusal = None if reply.accepted else reply.reason
        except RequestRefused as error:
            refusal = str(error)
        if refusal is not None:  # late or at fault: no error here. The next poll tells whether to try again or apply
            self.status.write("waiting", round=order.round, message=f"not accepted: {refusal}")
            self._submission, self._phase = None, "ready"
            self._refusals += 1

    # -------------------------------------------------------------------------------------------------------- apply

    def _advance(self, manifest: Manifest) -> None:
        """S_r to S_{r+1}, then the duties the manifest gives this member."""
        state = self._held
        self.status.write("applying", round=manifest.round)
        wait_ms = 0 if self._submitted_at is None else round((self._monotonic() - self._submitted_at) * 1000)
        self._submitted_at = None
        if manifest.round != state.round or manifest.base_state_digest not in (None, self._digest):
            self._resync(f"manifest {manifest.round} starts from another state than the one held")
            return
        started = self._monotonic()
        try:
            advanced, download_ms = self._applied_to(state, manifest)
        except (BlobMissing, PayloadError, StateError) as error:
            self._resync(str(error))
            return
        apply_ms = round((self._monotonic() - started) * 1000) - download_ms
        submission, self._submission = self._submission, None
        if submission is not None and any(entry.blob.digest == submission.blob.digest for entry in manifest.entries):
            self._residual = submission.residual  # otherwise what it carried was not taken, and is still owed
        self._hold(advanced)
        self._resyncs = self._refusals = 0
        bits = self._evaluate() if self._member_id in manifest.evaluate else None
        self._report(bits=bits, wait_ms=wait_ms, download_ms=download_ms, apply_ms=apply_ms)
        if manifest.snapshot_by == self._member_id:
            self._upload_state()

    def _applied_to(self, state: OuterState, manifest: Manifest) -> tuple[OuterState, int]:
        """The next state, and the milliseconds spent on fetching."""
        started = self._monotonic()
        paths = self.exchange.get_blobs([entry.blob.digest for entry in manifest.entries], self._blobs)
        download_ms = round((self._monotonic() - started) * 1000)
        layout = self._ready_island.layout

        def payload(blob: BlobRef) -> torch.Tensor:
            return codec.decode(paths[blob.digest].read_bytes(), numel=layout.numel, layout_digest=layout.digest)

        return apply_manifest(state, manifest, payload, self._known_run.outer), download_ms

    def _evaluate(self) -> float:
        self.status.write("evaluating", round=self._held.round)
        with self._gate:
            self._ready_island.load(self._held.params)
            bits = self._ready_island.evaluate()
        self.status.write("waiting", round=self._held.round, heldout_bits_per_byte=bits, state_digest=self._digest)
        return bits

    def _report(self, *, bits: float | None, wait_ms: int = 0, download_ms: int = 0, apply_ms: int = 0) -> None:
        self.exchange.applied(
            AppliedRequest(
                generation=self.exchange.generation,
                instance=self.exchange.instance,
                state_round=self._held.round,
                state_digest=self._digest,
                heldout_bits_per_byte=bits,
                heldout_bytes=None if bits is None else self._ready_island.evaluated_bytes,
                wait_ms=wait_ms,
                download_ms=download_ms,
                apply_ms=apply_ms,
            )
        )

    def _upload_state(self) -> None:
        path = self._workdir / "snapshot.safetensors"
        save_snapshot(self._held, path, job_id=self._known_run.job_id)
        blob = self.exchange.put_blob(path)
        self.exchange.snapshot(
            SnapshotRequest(
                generation=self.exchange.generation,
                instance=self.exchange.instance,
                state_round=self._held.round,
                state_digest=self._digest,
                blob=blob,
            )
        )

    def _finish(self) -> None:
        """The run has its tokens: the last figure and the last state, then say so until told to stop."""
        self.status.write("finishing", round=self._held.round)
        bits = self._evaluate()
        self._upload_state()
        self._report(bits=bits)
        self._phase = "final"

    def _clear_blobs(self) -> None:
        """Payloads of rounds gone by. A snapshot or payload that is needed again is fetched again."""
        if self._blobs.is_dir():
            for path in self._blobs.iterdir():
                path.unlink(missing_ok=True)

    # Three things that exist once the member has joined: asked for earlier, it is a defect of this loop.

    @property
    def _held(self) -> OuterState:
        return _present(self.state)

    @property
    def _ready_island(self) -> Island:
        return _present(self._island)

    @property
    def _known_run(self) -> RunSpec:
        return _present(self._run)


def _present(value: T | None) -> T:
    if value is None:
        raise TrainerError("the member has not joined its run")
    return value
