"""A job with members, as the tests of the coordinator need it: rows made directly, trainers played by hand.

Times are milliseconds after START; a member speaks through the services, as its trainer does over HTTP.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from django.conf import settings

from marketplace.accounts.models import Organisation
from marketplace.core.clock import minute_of
from marketplace.fleet.models import Island
from marketplace.trading.models import Lease, LeasePurpose, LeaseState, Sku
from marketplace.training.models import Artifact, Job, JobState, Member, Round, Seat
from marketplace.training.services import blobs, coordinator
from marketplace.training.services.membership import member_token, place_member
from marketplace.training.store import LocalStore, read_ticket
from tests.marketplace.trading.market import funded, make_island
from worker_agent.protocol import (
    CODEC_BLOCK,
    PAYLOAD_MAGIC,
    AppliedRequest,
    BlobPutRequest,
    BlobRef,
    BuiltinData,
    GptModel,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    Manifest,
    PayloadHeader,
    PollReply,
    PollRequest,
    RunSpec,
    SnapshotRequest,
    SubmitReply,
    SubmitRequest,
    SyncSpec,
)

START = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
LAYOUT = "1" * 64
NUMEL = 4
STEP_TOKENS = 128
DEADLINE_MS = 60_000
GRACE_MS = 2_000

_numbers = count(1)


def at(ms: float) -> datetime:
    return START + timedelta(milliseconds=ms)


def state(number: int, variant: str = "") -> str:
    """The digest everybody reports of S_number; another one with a variant."""
    return (f"{number:02x}" + variant + "a" * 64)[:64]


def make_job(*, tokens: int = 10_000, min_islands: int = 1, model: Any = None, **sync: Any) -> Job:
    buyer = funded(f"buyer {next(_numbers)}")
    terms = {"inner_steps": 4, "codec": "fp32", "round_deadline_ms": DEADLINE_MS, "grace_ms": GRACE_MS, "quorum": 0.5}
    run = RunSpec(
        job_id="filled in",
        seed=1,
        model=model or GptModel(n_layer=1, n_head=1, d_model=16, context=16),
        data=BuiltinData(),
        tokens=tokens,
        batch_tokens=STEP_TOKENS,
        sync=SyncSpec(**{**terms, **sync}),
    )
    return Job.objects.create(
        organisation=buyer,
        name="a model",
        spec={"data": {"kind": "builtin", "name": "python-stdlib"}, "sync": "auto"},
        run=msgspec.to_builtins(run),
        state=JobState.RUNNING,
        state_since=START,
        budget_uusd=10**9,
        min_islands=min_islands,
        parameters=NUMEL,
        tokens_target=tokens,
        created_by="test",
        created_at=START,
    )


def make_lease(job: Job, island: Island | None = None) -> Lease:
    """A lease row alone: no money and no positions, which are trading's to test."""
    island = island or make_island()
    sku, _ = Sku.objects.get_or_create(
        island=island,
        retired_at=None,
        defaults={
            "originator": island.organisation,
            "gpu": island.gpu,
            "gpus_per_lot": 1,
            "lots": island.gpu_count,
            "created_at": START,
        },
    )
    return Lease.objects.create(
        organisation=job.organisation,
        seller=island.organisation,
        sku=sku,
        island=island,
        lots=1,
        gpus=1,
        purpose=LeasePurpose.JOB,
        job_ref=job.pk,
        price_uusd_per_gpu_hour=island.price_uusd_per_gpu_hour,
        fee_bps=500,
        start_min=minute_of(START),
        end_min=minute_of(START) + 600,
        state=LeaseState.ACTIVE,
        created_by="test",
        created_at=START,
    )


def payload(job: Job, member: Member, round_number: int, values: list[float], tokens: int, **changed: Any) -> bytes:
    header = PayloadHeader(
        codec="fp32",
        block=CODEC_BLOCK,
        numel=NUMEL,
        layout_digest=LAYOUT,
        job_id=job.pk,
        round=round_number,
        member_id=member.pk,
        tokens=tokens,
    )
    head = msgspec.json.encode(msgspec.structs.replace(header, **changed))
    return PAYLOAD_MAGIC + struct.pack("<I", len(head)) + head + np.array(values, dtype="<f4").tobytes()


class Trainer:
    """One member's trainer, saying what it is told to say."""

    def __init__(self, member: Member, instance: str = "one") -> None:
        self.member = member
        self.generation = member.generation
        self.token = member_token(member)
        self.instance = instance
        self.step_ms: int | None = None

    @property
    def job(self) -> Job:
        return Job.objects.get(pk=self.member.job_id)

    @property
    def row(self) -> Member:
        return Member.objects.get(pk=self.member.pk)

    def join(self, ms: float = 0) -> JoinReply:
        return coordinator.join(self.token, JoinRequest(generation=self.generation, instance=self.instance), at(ms))

    def poll(self, held: int, ms: float = 0, *, digest: str | None = None, phase: Any = "ready") -> PollReply:
        request = PollRequest(
            generation=self.generation,
            instance=self.instance,
            state_round=held,
            state_digest=state(held) if digest is None else digest,
            phase=phase,
            step_ms=self.step_ms,
            parameters=NUMEL,
            layout_digest=LAYOUT,
        )
        return coordinator.poll(self.token, request, at(ms))

    def put(self, data: bytes, ms: float = 0) -> BlobRef:
        """Announce and send, as over HTTP but for the HTTP."""
        import hashlib

        ref = BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        asked = BlobPutRequest(digest=ref.digest, size_bytes=ref.size_bytes)
        reply = blobs.put_blob(coordinator.recognise(self.token), asked, at(ms))
        if not reply.exists:
            ticket = read_ticket(reply.url.removeprefix("/artifacts/"), "put")
            LocalStore(Path(settings.ARTIFACT_DIR)).write(ticket.digest, ticket.size_bytes, [data])
            blobs.note_stored(ticket.artifact_id, at(ms))
        return ref

    def submit(
        self,
        number: int,
        ms: float = 0,
        *,
        values: list[float] | None = None,
        tokens: int = STEP_TOKENS,
        data: bytes | None = None,
        base: str | None = None,
        **changed: Any,
    ) -> SubmitReply:
        given = values or [1.0, 0.0, 0.0, float(next(_numbers)) * 1e-6]
        data = payload(self.job, self.member, number, given, tokens, **changed) if data is None else data
        request = SubmitRequest(
            generation=self.generation,
            instance=self.instance,
            round=number,
            blob=self.put(data, ms),
            tokens=tokens,
            steps=-(-tokens // STEP_TOKENS),
            base_state_digest=base or state(number),
            train_loss_nats=2.0,
            norm=1.0,  # claimed; never used
            compute_ms=1_000,
        )
        return coordinator.submit(self.token, request, at(ms))

    def applied(self, held: int, ms: float = 0, *, digest: str | None = None, bits: float | None = None) -> None:
        request = AppliedRequest(
            generation=self.generation,
            instance=self.instance,
            state_round=held,
            state_digest=digest or state(held),
            heldout_bits_per_byte=bits,
        )
        coordinator.applied(self.token, request, at(ms))

    def snapshot(self, held: int, ms: float = 0, *, digest: str | None = None, data: bytes = b"") -> BlobRef:
        ref = self.put(data or f"snapshot {held} {digest}".encode(), ms)
        request = SnapshotRequest(
            generation=self.generation,
            instance=self.instance,
            state_round=held,
            state_digest=digest or state(held),
            blob=ref,
        )
        coordinator.snapshot(self.token, request, at(ms))
        return ref

    def leave(self, ms: float = 0, reason: str = "drain") -> None:
        request = LeaveRequest(generation=self.generation, instance=self.instance, reason=reason)
        coordinator.leave(self.token, request, at(ms))


def crew(job: Job, size: int, *, joined: bool = True) -> list[Trainer]:
    """Members by id, and so in the order of manifests."""
    members = [place_member(job, make_lease(job), START, "the test says so") for _ in range(size)]
    trainers = [Trainer(member) for member in sorted(members, key=lambda member: member.pk)]
    if joined:
        for trainer in trainers:
            trainer.join()
    return trainers


def opened(job: Job, size: int) -> list[Trainer]:
    """A crew in the open round 0."""
    trainers = crew(job, size)
    for trainer in trainers:
        trainer.poll(0)
    assert trainers[0].poll(0).command == "train"
    return trainers


def advance_all(trainers: list[Trainer], number: int, ms: float = 0) -> None:
    """Everybody submits to round `number`, applies it and stands at the next."""
    for trainer in trainers:
        trainer.submit(number, ms)
    for trainer in trainers:
        assert trainer.poll(number, ms, phase="submitted").command == "apply"
        trainer.applied(number + 1, ms)
        trainer.poll(number + 1, ms)


def manifest(job: Job, number: int) -> Manifest:
    return msgspec.convert(Round.objects.get(job=job, number=number).manifest, Manifest)


def seat(trainer: Trainer, number: int) -> Seat:
    return Seat.objects.get(round__job=trainer.member.job_id, round__number=number, member=trainer.member)


def artifacts(job: Job, kind: str) -> list[str]:
    return list(
        Artifact.objects.filter(job=job, kind=kind).order_by("created_at", "pk").values_list("digest", flat=True)
    )


def organisation_of(job: Job) -> Organisation:
    return job.organisation
