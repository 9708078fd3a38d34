"""What a member's trainer says and hears: join, poll, submit, applied, snapshot, leave.

Invariant: the answer depends on the rows and the clock only, never on which web process gives it or what was said
before; all state is in the database. A poll that changes nothing locks nothing but its own row, in four queries.
Whether a submission may count is decided from its bytes, read from the store before the job's lock is taken.
"""

from __future__ import annotations

import math
from datetime import datetime
from functools import partial

import msgspec
from django.db import transaction
from django.db.models import Q, QuerySet

from marketplace.core.clock import to_ms
from marketplace.core.errors import Conflict, Gone, InvalidInput, NotFound, Unauthorised
from marketplace.trading.selectors import LIVE
from marketplace.trading.services import end_lease
from marketplace.training import payloads
from marketplace.training.models import (
    ENDED,
    Artifact,
    ArtifactKind,
    Job,
    JobEvent,
    JobState,
    Member,
    MemberState,
    Round,
    RoundState,
    Seat,
)
from marketplace.training.orders import tokens_per_step
from marketplace.training.sealing import leader_of
from marketplace.training.services import blobs, rounds
from marketplace.training.services.membership import member_gone, read_token, tell
from marketplace.training.store import current_store, demand_digest, demand_size
from worker_agent.protocol import (
    CODEC_BLOCK,
    PAYLOAD_HEADER_MAX_BYTES,
    PAYLOAD_MAGIC,
    AppliedRequest,
    BlobRef,
    GptModel,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    Manifest,
    PollReply,
    PollRequest,
    RoundOrder,
    SnapshotRequest,
    SubmitReply,
    SubmitRequest,
)

POLL_MS = 250
POLL_SLOWEST_MS = 2_000  # well below rounds.SILENT
INSTANCE_LENGTH = 80
INT_MAX = 2**31 - 1
BIG_MAX = 2**53
BITS_MAX = 1_000.0  # a figure above is no measurement


def recognise(token: str, generation: int | None = None, instance: str | None = None) -> Member:
    """Who calls. 401: nobody we know; 410: its assignment is over; 409 stale_generation: another holds its place."""
    member_id, of_token = read_token(token)
    member = Member.objects.select_related("job", "lease__island").filter(pk=member_id).first()
    if member is None:
        raise Unauthorised("this is no member's token")
    if member.state == MemberState.GONE or member.lease.state not in LIVE:
        raise Gone(f"the assignment has ended: {member.gone_why or member.lease.end_reason}")
    if of_token != member.generation or (generation is not None and generation != member.generation):
        raise Conflict("a newer start of the trainer holds this place", code="stale_generation")
    if instance is not None and instance != member.instance:
        raise Conflict("another process holds this member's place", code="stale_generation")
    return member


# ----------------------------------------------------------------------------------------------------------- join


def join(token: str, request: JoinRequest, now: datetime) -> JoinReply:
    """Take the place: newest snapshot in the store, and the manifests since. Whoever held it is fenced off."""
    if not 0 < len(request.instance) <= INSTANCE_LENGTH or not request.instance.isprintable():
        raise InvalidInput.at("instance", f"must be 1 to {INSTANCE_LENGTH} printable characters")
    member = recognise(token, request.generation)
    job = member.job
    with transaction.atomic():
        draining = member.state == MemberState.DRAINING
        # Guarded by the state seen as well: one asked to leave in between is not made active again.
        taken = (
            _held(member)
            .filter(state=member.state)
            .update(
                state=MemberState.DRAINING if draining else MemberState.ACTIVE,
                instance=request.instance,
                phase="",
                state_round=None,
                device=request.device[:40],
                joined_at=now,
                last_poll_at=now,
            )
        )
        if not taken:
            raise Conflict("the place changed hands just now", code="stale_generation")
        if member.instance != request.instance:
            when = f"after round {job.rounds_sealed - 1}" if job.rounds_sealed else "at the start"
            words = f"{member.lease.island.name} joined {when}, training on {request.device[:40]}"
            tell(job.pk, "joined", words, now, member=member.pk, generation=member.generation)
    snapshot = (
        Artifact.objects.filter(job=job, kind=ArtifactKind.SNAPSHOT, stored_at__isnull=False)
        .order_by("-round_number")
        .first()
    )
    base = snapshot.round_number or 0 if snapshot else 0
    manifests = (
        Round.objects.filter(job=job, state=RoundState.SEALED, number__gte=base)
        .order_by("number")
        .values_list("manifest", flat=True)
    )
    return JoinReply(
        member_id=member.pk,
        run=rounds.run_of(job),
        server_time_ms=to_ms(now),
        snapshot=BlobRef(digest=snapshot.digest, size_bytes=snapshot.size_bytes) if snapshot else None,
        snapshot_round=base,
        snapshot_state_digest=snapshot.state_digest if snapshot else None,
        manifests=[msgspec.convert(manifest, Manifest) for manifest in manifests],
    )


# ----------------------------------------------------------------------------------------------------------- poll


def poll(token: str, request: PollRequest, now: datetime) -> PollReply:
    member = recognise(token, request.generation, request.instance)
    _demand_counts(request, ("state_round", "steps_done"), INT_MAX)
    _demand_counts(request, ("tokens_done",), BIG_MAX)
    _demand_layout(member.job, request)
    step_ms = min(request.step_ms, INT_MAX) if request.step_ms and request.step_ms > 0 else member.step_ms
    heard = _held(member).update(
        phase=request.phase,
        state_round=request.state_round,
        steps_done=request.steps_done,
        tokens_done=request.tokens_done,
        step_ms=step_ms,
        last_poll_at=now,
    )
    if not heard:
        raise Conflict("the place changed hands just now", code="stale_generation")
    member.state_round, member.step_ms, member.last_poll_at = request.state_round, step_ms, now
    job, near = member.job, _rounds_near(member.job, request.state_round)
    standing = rounds.standing_of(job, round_=near.get(job.rounds_sealed))
    move = rounds.due(standing, now)
    # A round that is to begin again begins with somebody who is ready; others need not queue for the lock.
    if move is not None and (move != "restart" or request.state_round == job.rounds_sealed):
        rounds.advance(job.pk, now)
        job.refresh_from_db()
        near = _rounds_near(job, request.state_round)
        standing = rounds.standing_of(job, round_=near.get(job.rounds_sealed), members=[])
    return _answer(member, request, standing, near, now)


def _rounds_near(job: Job, state_round: int) -> dict[int, Round]:
    """The round that made the state held, the one that starts from it, and the open one: by number, in one query."""
    wanted = {state_round - 1, state_round, job.rounds_sealed}
    return {found.number: found for found in Round.objects.filter(job=job, number__in=wanted)}


def _answer(
    member: Member, request: PollRequest, standing: rounds.Standing, near: dict[int, Round], now: datetime
) -> PollReply:
    job, held, sealed = standing.job, request.state_round, standing.job.rounds_sealed
    reply = partial(PollReply, server_time_ms=to_ms(now))
    if job.state in ENDED:
        return reply(command="stop", reason=job.reason or f"the job is {job.get_state_display().lower()}")
    known = _digest_of(near, held)
    if held > sealed or (request.state_digest is not None and known and request.state_digest != known):
        _tell_resync(member, held, now)
        return reply(command="resync", reason="the state held is not the run's")
    if held < sealed:
        manifest = near[held].manifest
        return reply(command="apply", manifest=msgspec.convert(manifest, Manifest))
    if job.tokens_sealed >= standing.run.tokens or job.state == JobState.FINISHING:
        return reply(command="stop" if request.phase == "final" else "finish")
    seat = next((seat for seat in standing.seats if seat.member_id == member.pk), None)
    over = seat is None or seat.submitted_at is not None or bool(seat.fault)
    if over and member.state == MemberState.DRAINING:
        return reply(command="stop", reason="asked to leave")
    if over or seat is None or standing.round is None or request.phase == "submitted":
        why = f"its submission was refused: {seat.fault}" if seat and seat.fault else ""
        return reply(command="wait", next_poll_ms=POLL_MS, reason=why)
    order = RoundOrder(
        round=standing.round.number,
        steps=seat.steps,
        tokens_before=standing.round.tokens_before,
        data_slot=seat.data_slot,
        data_slots=max(each.data_slot for each in standing.seats) + 1,
        deadline_ms=to_ms(standing.round.deadline_at),
        data_start=seat.data_start,
    )
    patient_ms = min(max(member.step_ms or 0, POLL_MS), POLL_SLOWEST_MS)
    return reply(command="train", next_poll_ms=patient_ms, order=order)


def _digest_of(near: dict[int, Round], state_round: int) -> str:
    """What most members hold as S_state_round; "" while nobody can tell. The sealed manifest that starts from it is the
    last word; before, it is what was reported by those who applied the one that made it."""
    following, making = near.get(state_round), near.get(state_round - 1)
    if following is not None and following.manifest is not None:
        return following.manifest.get("base_state_digest") or ""
    return making.state_digest if making is not None else ""


def _tell_resync(member: Member, state_round: int, now: datetime) -> None:
    """Once for each state a process holds wrongly, however often it polls."""
    told = {"member": member.pk, "instance": member.instance, "round": state_round}
    if JobEvent.objects.filter(job_id=member.job_id, kind="resync", detail=told).exists():
        return
    words = f"{member.lease.island.name} held another state {state_round} than the run's and takes it anew"
    tell(member.job_id, "resync", words, now, **told)


def _demand_layout(job: Job, request: PollRequest) -> None:
    """All members train one model. The first to have built it says how its parameters lie, and how many a user's own
    module has."""
    if not request.layout_digest or not request.parameters:
        return
    if not job.layout_digest:
        demand_digest(request.layout_digest, "layout_digest")
        if isinstance(rounds.run_of(job).model, GptModel) and request.parameters != job.parameters:
            raise InvalidInput.at("parameters", f"the job's model has {job.parameters:,} parameters")
        told = {"layout_digest": request.layout_digest, "parameters": min(request.parameters, BIG_MAX)}
        Job.objects.filter(pk=job.pk, layout_digest="").update(**told)
        job.refresh_from_db()
    if (request.layout_digest, request.parameters) != (job.layout_digest, job.parameters):
        raise InvalidInput.at("layout_digest", "the parameters do not lie as those of the run's other members")


# ------------------------------------------------------------------------------------------------------- submit


def submit(token: str, request: SubmitRequest, now: datetime) -> SubmitReply:
    """Take a contribution into the open round, if its bytes are what it says. The first that is taken stays; repeating
    it is answered alike."""
    member = recognise(token, request.generation, request.instance)
    _demand_submission(request)
    answered = _already(member, request)
    if answered is not None:
        return answered
    fault, norm = _judge(member, request, now)  # reads the bytes: before the lock, not under it
    with transaction.atomic():
        job = rounds.lock_job(member.job_id)
        if not _held(member).update(last_poll_at=now):
            raise Conflict("the place changed hands just now", code="stale_generation")
        answered = _already(member, request)
        if answered is not None:
            return answered
        rows = Seat.objects.filter(
            round__job=job, round__number=request.round, round__state=RoundState.OPEN, member=member, submitted_at=None
        )
        if fault:
            rows.update(fault=fault)
        else:
            rows.update(
                submitted_at=now,
                digest=request.blob.digest,
                size_bytes=request.blob.size_bytes,
                tokens=request.tokens,
                steps_done=request.steps,
                norm=norm,
                train_loss_nats=request.train_loss_nats,
                base_state_digest=request.base_state_digest,
                compute_ms=request.compute_ms,
                encode_ms=request.encode_ms,
                upload_ms=request.upload_ms,
                fault="",
            )
        rounds.advance_locked(job, now)
    return SubmitReply(accepted=not fault, reason=fault)


def _already(member: Member, request: SubmitRequest) -> SubmitReply | None:
    """The answer where there is nothing to decide: the round is over, not this member's, or was submitted to."""
    mine = Seat.objects.filter(round__job=member.job_id, round__number=request.round, member=member)
    seat = mine.select_related("round").first()
    if seat is None:
        return SubmitReply(accepted=False, reason="late")
    if seat.submitted_at is not None and seat.digest == request.blob.digest:
        counted = seat.accepted is not False
        return SubmitReply(accepted=counted, reason="" if counted else seat.refused_why)
    if seat.submitted_at is not None or seat.round.state == RoundState.SEALED:
        return SubmitReply(accepted=False, reason="late")
    return SubmitReply(accepted=False, reason=seat.fault) if seat.fault else None


def _judge(member: Member, request: SubmitRequest, now: datetime) -> tuple[str, float]:
    """One word for what is wrong with it by itself ("" where nothing is), and its norm as we measured it."""
    job, run = member.job, rounds.run_of(member.job)
    seat = Seat.objects.filter(round__job=job, round__number=request.round, member=member).first()
    if seat is None or not 0 < request.steps <= seat.steps:
        return "steps", 0.0
    if not 0 < request.tokens <= request.steps * tokens_per_step(run):
        return "tokens", 0.0
    # Judged by what is announced, before memory is set aside for it.
    body = payloads.body_bytes(run.sync.codec, job.parameters, CODEC_BLOCK)
    limit = len(PAYLOAD_MAGIC) + 4 + PAYLOAD_HEADER_MAX_BYTES + body
    if request.blob.size_bytes > limit:
        return "shape", 0.0
    if blobs.seen(job, request.blob.digest, request.blob.size_bytes, now) is None:
        return "digest", 0.0
    try:
        payload = current_store().read(request.blob.digest, limit)
        reading = payloads.inspect(payload, numel=job.parameters, layout_digest=job.layout_digest)
    except (NotFound, Conflict):
        return "digest", 0.0
    except payloads.PayloadFault as fault:
        return fault.reason, 0.0
    header = reading.header
    said = (header.job_id, header.round, header.member_id, header.tokens, header.codec)
    if said != (job.pk, request.round, member.pk, request.tokens, run.sync.codec):
        return "header", 0.0
    return "", reading.norm


def _demand_submission(request: SubmitRequest) -> None:
    demand_digest(request.blob.digest, "blob.digest")
    demand_size(request.blob.size_bytes, "blob.size_bytes")
    demand_digest(request.base_state_digest, "base_state_digest")
    _demand_counts(request, ("round", "steps"), INT_MAX)
    _demand_counts(request, ("tokens", "compute_ms", "encode_ms", "upload_ms"), BIG_MAX)
    if not math.isfinite(request.train_loss_nats):
        raise InvalidInput.at("train_loss_nats", "must be a finite number")


# ------------------------------------------------------------------------------------------- applied and snapshot


def applied(token: str, request: AppliedRequest, now: datetime) -> None:
    """What a member holds after a round, and the held-out figure if it was to measure one."""
    member = recognise(token, request.generation, request.instance)
    demand_digest(request.state_digest, "state_digest")
    _demand_counts(request, ("state_round",), INT_MAX)
    _demand_counts(request, ("wait_ms", "download_ms", "apply_ms"), BIG_MAX)
    bits = request.heldout_bits_per_byte
    if bits is not None and not 0 <= bits <= BITS_MAX:
        raise InvalidInput.at("heldout_bits_per_byte", f"must be between 0 and {BITS_MAX:g}")
    _held(member).update(last_poll_at=now)
    if request.state_round == 0:
        _take_first_figure(member, bits)
        return
    with transaction.atomic():
        # The round's row orders those who report at once: the last of them sees all.
        made = (
            Round.objects.select_for_update(no_key=True)
            .filter(job=member.job_id, number=request.state_round - 1, state=RoundState.SEALED)
            .first()
        )
        if made is None:
            raise InvalidInput.at("state_round", "this round is not sealed")
        times = {"wait_ms": request.wait_ms, "download_ms": request.download_ms, "apply_ms": request.apply_ms}
        report = {"applied_at": now, "applied_digest": request.state_digest}
        mine = Seat.objects.filter(round=made, member=member)
        # The final state is reported twice, the second time without the times of applying it.
        mine.update(**report, **(times if any(times.values()) else {}))
        reported = _reported(made)
        leader = leader_of(reported)
        if leader != made.state_digest:
            made.state_digest = leader
            made.save(update_fields=["state_digest"])
        manifest = msgspec.convert(made.manifest, Manifest)
        asked = member.pk in manifest.evaluate or member.job.state == JobState.FINISHING
        agrees = not reported or request.state_digest == leader
        if bits is not None and asked and agrees and made.heldout_bits_per_byte is None:
            made.heldout_bits_per_byte = bits
            made.save(update_fields=["heldout_bits_per_byte"])
            _take_last_figure(member.job_id)


def _reported(made: Round) -> list[str]:
    """The digests of the state the round made, as its members hold it."""
    rows = Seat.objects.filter(round=made).exclude(applied_digest="").order_by("member_id")
    return list(rows.values_list("applied_digest", flat=True))


def _take_first_figure(member: Member, bits: float | None) -> None:
    """Where the run starts from, by the member of its first place."""
    first = Seat.objects.filter(round__job=member.job_id, round__number=0, data_slot=0, member=member)
    if bits is not None and first.exists():
        Job.objects.filter(pk=member.job_id, bits_per_byte_first=None).update(bits_per_byte_first=bits)


def _take_last_figure(job_id: str) -> None:
    measured = Round.objects.filter(job=job_id, heldout_bits_per_byte__isnull=False).order_by("-number")
    newest = measured.values_list("heldout_bits_per_byte", flat=True).first()
    Job.objects.filter(pk=job_id).update(bits_per_byte_last=newest)


def snapshot(token: str, request: SnapshotRequest, now: datetime) -> None:
    """Keep a full state as the run's, if it is the one most members hold."""
    member = recognise(token, request.generation, request.instance)
    job = member.job
    demand_digest(request.state_digest, "state_digest")
    demand_digest(request.blob.digest, "blob.digest")
    if not 0 < request.state_round <= job.rounds_sealed:
        raise InvalidInput.at("state_round", "this round is not sealed")
    _held(member).update(last_poll_at=now)
    near = _rounds_near(job, request.state_round)
    known = _digest_of(near, request.state_round)
    # With nobody's word yet there is nothing to compare with; while as many hold another one, it is nobody's state.
    if known != request.state_digest and (known or _reported(near[request.state_round - 1])):
        raise Conflict("the state held is not the run's", code="other_state")
    artifact = blobs.seen(job, request.blob.digest, request.blob.size_bytes, now)
    if artifact is None:
        raise InvalidInput.at("blob", "these bytes have not arrived in the store")
    Artifact.objects.filter(pk=artifact.pk).update(
        kind=ArtifactKind.SNAPSHOT,
        name=f"{job.name[:80]} after round {request.state_round}.safetensors",
        round_number=request.state_round,
        state_digest=request.state_digest,
    )


# -------------------------------------------------------------------------------------------------------- leave


def leave(token: str, request: LeaveRequest, now: datetime) -> None:
    """It goes, and says so: nobody waits for it, and its lease ends. One that leaves by an error comes again."""
    member = recognise(token, request.generation, request.instance)
    if request.reason == "error":
        _held(member).update(instance="", phase="", state_round=None)
        return
    with transaction.atomic():
        why = {"drain": "its trainer was asked to end", "stop": "its work is done"}.get(request.reason, request.reason)
        member_gone(member.pk, why, now, kind="left")
        end_lease(member.lease_id, reason="released", by=f"member:{member.pk}", now=now)
    rounds.advance(member.job_id, now)


# ------------------------------------------------------------------------------------------------------- shared


def _held(member: Member) -> QuerySet[Member]:
    """The member's row, while it is still the caller's."""
    return Member.objects.filter(
        Q(pk=member.pk, generation=member.generation) & ~Q(state=MemberState.GONE), instance=member.instance
    )


def _demand_counts(request: object, names: tuple[str, ...], limit: int) -> None:
    for name in names:
        if not 0 <= getattr(request, name) <= limit:
            raise InvalidInput.at(name, f"must be between 0 and {limit:,}")
