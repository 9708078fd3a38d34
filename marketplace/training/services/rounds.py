"""A round is opened, sealed, or begun again: the only writer of rounds, seats' outcomes and manifests.

    nothing open   all assigned members are ready (round 0), anybody is (later)      -> open
    open           the quorum is there for the first time                           -> note when; the grace begins
    open           everyone has submitted or is gone; grace or deadline is over     -> seal; open the next with the seal
    open           nothing was submitted, and nobody will or the deadline is over    -> begin again with who is there

Invariant: each change is made under the job's row lock, from rows read under it, so several web processes and the sweep
may find the same thing due and one of them does it. Whether something is due is a pure function of rows and clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import msgspec
from django.db import transaction

from marketplace.billing.selectors import metered_uusd
from marketplace.core.clock import to_ms
from marketplace.trading.models import Lease
from marketplace.trading.selectors import LIVE
from marketplace.training import sealing
from marketplace.training.models import (
    ENDED,
    JOB_MACHINE,
    Job,
    JobState,
    Member,
    MemberState,
    Round,
    RoundState,
    Seat,
)
from marketplace.training.orders import orders_of
from marketplace.training.services.membership import live_members, tell
from worker_agent.protocol import BlobRef, Manifest, RunSpec

# Members poll every two seconds at least: silence for several of these is not the network's hiccup. A silent member is
# not taken into the next round, so that one killed holds up one round and no more; it is back with its next poll.
SILENT = timedelta(seconds=10)

Move = Literal["open", "quorum", "seal", "restart"]


@dataclass(frozen=True)
class Standing:
    """Where a job's open round stands. `members` is read only where it matters: with no round open, or under the
    lock."""

    job: Job
    run: RunSpec
    round: Round | None
    seats: Sequence[Seat]
    members: Sequence[Member] | None


def run_of(job: Job) -> RunSpec:
    return msgspec.structs.replace(msgspec.convert(job.run, RunSpec), job_id=job.pk)


def seats_of(round_: Round) -> list[Seat]:
    return list(round_.seats.select_related("member__lease__island").order_by("member_id"))


def standing_of(job: Job, *, round_: Round | None, members: Sequence[Member] | None = None) -> Standing:
    seats = seats_of(round_) if round_ is not None else []
    if round_ is None and members is None:
        members = live_members(job.pk)
    return Standing(job, run_of(job), round_, seats, members)


def due(standing: Standing, now: datetime) -> Move | None:
    """What is to be done now, if anything."""
    job, run, current = standing.job, standing.run, standing.round
    if job.state in (*ENDED, JobState.FINISHING) or job.tokens_sealed >= run.tokens:
        return None
    if current is None:
        return "open" if _may_open(standing, now) else None
    seats = [view_of(seat) for seat in standing.seats]
    sync, now_ms = run.sync, to_ms(now)
    if sealing.is_due(
        seats,
        now_ms=now_ms,
        deadline_ms=to_ms(current.deadline_at),
        quorum_at_ms=None if current.quorum_at is None else to_ms(current.quorum_at),
        quorum=sync.quorum,
        grace_ms=sync.grace_ms,
    ):
        return "seal"
    if any(seat.contribution for seat in seats):
        return "quorum" if current.quorum_at is None and sealing.quorum_reached(seats, sync.quorum) else None
    return "restart" if now >= current.deadline_at or all(seat.gone for seat in seats) else None


def view_of(seat: Seat) -> sealing.Seat:
    """The seat as the rules of sealing see it. One whose submission was refused brings nothing more this round."""
    member, contribution = seat.member, None
    if seat.submitted_at is not None:
        contribution = sealing.Contribution(
            blob=BlobRef(digest=seat.digest, size_bytes=seat.size_bytes or 0),
            tokens=seat.tokens or 0,
            norm=seat.norm or 0.0,
            base_state_digest=seat.base_state_digest,
        )
    gone = bool(seat.fault) or member.state == MemberState.GONE or member.lease.state not in LIVE
    return sealing.Seat(member.pk, contribution, gone=gone, fault=seat.fault or None)


def advance(job_id: str, now: datetime) -> None:
    """Do what is due, under the job's lock; at most what one call can cause: a seal and the next round with it."""
    with transaction.atomic():
        advance_locked(lock_job(job_id), now)


def lock_job(job_id: str) -> Job:
    return Job.objects.select_for_update(no_key=True).get(pk=job_id)


def advance_locked(job: Job, now: datetime) -> None:
    current = Round.objects.filter(job=job, state=RoundState.OPEN).first()
    standing = standing_of(job, round_=current, members=live_members(job.pk))
    move = due(standing, now)
    if move == "open":
        _open(standing, ready_for(standing, job.rounds_sealed, now), now)
    elif move == "seal":
        _seal(standing, now)
    elif move == "restart":
        _restart(standing, now)
    elif move == "quorum" and current is not None:
        Round.objects.filter(pk=current.pk).update(quorum_at=now)
        current.quorum_at = now
        if due(standing, now) == "seal":  # no grace was asked for
            _seal(standing, now)


def ready_for(standing: Standing, number: int, now: datetime) -> list[Member]:
    """Who can start round `number` now: it holds S_number, or will as soon as it has applied what was just sealed."""
    members = standing.members or []
    return [
        member
        for member in members
        if member.state == MemberState.ACTIVE
        and member.instance
        and member.state_round is not None
        and member.state_round >= number
        and member.last_poll_at is not None
        and now - member.last_poll_at <= SILENT
    ]


def _may_open(standing: Standing, now: datetime) -> bool:
    """Round 0 waits for all that are on their way, but not for ever; a later one for nobody, since it opens with the
    seal before it and only an empty run gets here."""
    ready = ready_for(standing, standing.job.rounds_sealed, now)
    if not ready or standing.job.rounds_sealed:
        return bool(ready)
    expected = [m for m in standing.members or [] if m.state in (MemberState.ASSIGNED, MemberState.ACTIVE)]
    first = min(member.joined_at or now for member in ready)
    waited = now >= first + timedelta(milliseconds=standing.run.sync.round_deadline_ms)
    enough = len(ready) >= standing.job.min_islands
    everyone = len(ready) >= len(expected)
    return (enough and (everyone or waited)) or (everyone and waited)


def _open(standing: Standing, roster: Sequence[Member], now: datetime) -> None:
    job, run = standing.job, standing.run
    if not roster:
        return
    opened = Round.objects.create(
        job=job,
        number=job.rounds_sealed,
        opened_at=now,
        deadline_at=now + timedelta(milliseconds=run.sync.round_deadline_ms),
        tokens_before=job.tokens_sealed,
    )
    _seat(job, run, opened, roster, ())
    if job.started_at is None:
        job.started_at = now
        job.save(update_fields=["started_at"])
    waiting = Job.objects.filter(pk=job.pk, state__in=[JobState.QUEUED, JobState.WAITING])
    if JOB_MACHINE.try_advance(waiting, JobState.RUNNING, state_since=now, reason=""):
        job.state = JobState.RUNNING


def _seat(job: Job, run: RunSpec, round_: Round, roster: Sequence[Member], kept: Sequence[Seat]) -> None:
    orders, cursor = orders_of(
        run,
        {member.pk: member.step_ms for member in roster},
        tokens_before=round_.tokens_before,
        cursor=job.data_cursor,
        taken_slots={seat.data_slot for seat in kept},
        others=len(kept),
    )
    Seat.objects.bulk_create(
        Seat(
            round=round_,
            member_id=order.member_id,
            steps=order.steps,
            data_slot=order.data_slot,
            data_start=order.data_start,
        )
        for order in orders
    )
    job.data_cursor = cursor
    job.save(update_fields=["data_cursor"])


def _restart(standing: Standing, now: datetime) -> None:
    """Nothing to seal: who is there now begins again. A member that is still at it keeps the order it has, so its work
    is not lost; a place that is empty is given away. With nobody ready the round stays as it is, until somebody is."""
    current = standing.round
    ready = ready_for(standing, standing.job.rounds_sealed, now)
    if current is None or not ready:
        return
    here = {member.pk for member in ready}
    kept = [seat for seat in standing.seats if seat.member_id in here]
    Seat.objects.filter(round=current).exclude(member__in=here).delete()
    Seat.objects.filter(round=current).update(fault="")
    Round.objects.filter(pk=current.pk).update(
        attempt=current.attempt + 1,
        opened_at=now,
        deadline_at=now + timedelta(milliseconds=standing.run.sync.round_deadline_ms),
        quorum_at=None,
    )
    seated = {seat.member_id for seat in kept}
    newcomers = [member for member in ready if member.pk not in seated]
    _seat(standing.job, standing.run, current, newcomers, kept)
    names = _names(ready)
    words = f"Round {current.number} begins again with {names}: nothing had been submitted"
    tell(standing.job.pk, "restarted", words, now, round=current.number, attempt=current.attempt + 1)


def _seal(standing: Standing, now: datetime) -> None:
    job, run, current = standing.job, standing.run, standing.round
    outcome = sealing.outcome_of([view_of(seat) for seat in standing.seats])
    if current is None or not outcome.entries:
        _restart(standing, now)
        return
    accepted = {entry.member_id: entry for entry in outcome.entries}
    refused = {refusal.member_id: refusal.reason for refusal in outcome.refused}
    last = job.tokens_sealed + outcome.tokens >= run.tokens
    duty = _duty(standing, list(accepted), current.number) if not last else None
    with_snapshot = duty is not None and (current.number + 1) % max(1, run.sync.snapshot_every) == 0
    manifest = Manifest(
        round=current.number,
        entries=list(outcome.entries),
        tokens_before=current.tokens_before,
        tokens=outcome.tokens,
        refused=list(outcome.refused),
        base_state_digest=outcome.base_state_digest,
        evaluate=[duty] if duty else [],
        snapshot_by=duty if with_snapshot else None,
    )
    seats = {seat.member_id: seat for seat in standing.seats}
    for member_id, seat in seats.items():
        entry = accepted.get(member_id)
        seat.accepted, seat.clip = entry is not None, entry.clip if entry else None
        seat.refused_why = refused.get(member_id, "")
    Seat.objects.bulk_update(seats.values(), ["accepted", "clip", "refused_why"])
    weighted = sum(entry.weight * (seats[member_id].train_loss_nats or 0.0) for member_id, entry in accepted.items())
    spent_uusd = spent_so_far_uusd(job.pk)
    Round.objects.filter(pk=current.pk, state=RoundState.OPEN).update(
        state=RoundState.SEALED,
        sealed_at=now,
        tokens=outcome.tokens,
        manifest=msgspec.to_builtins(manifest),
        bytes_sent=sum(seat.size_bytes or 0 for seat in seats.values()),
        train_loss_nats=weighted / outcome.tokens,
        spent_uusd=spent_uusd,
    )
    if current.number and outcome.base_state_digest:
        # Which state the round started from is settled now, also where the reports left a tie.
        Round.objects.filter(job=job, number=current.number - 1).update(state_digest=outcome.base_state_digest)
    _credit_members([seats[member_id] for member_id in accepted])
    job.tokens_sealed += outcome.tokens
    job.rounds_sealed = current.number + 1
    job.save(update_fields=["tokens_sealed", "rounds_sealed"])
    _tell_sealed(standing, manifest, now)
    if last:
        _finish(job, now)
        return
    # Who is there takes part; who was just counted was there a moment ago, however long its upload kept it silent.
    ready = {member.pk: member for member in ready_for(standing, current.number, now)}
    for member in standing.members or []:
        if member.pk in accepted and member.state == MemberState.ACTIVE and member.instance:
            ready.setdefault(member.pk, member)
    _open(standing, [ready[member_id] for member_id in sorted(ready)], now)


def _duty(standing: Standing, accepted: Sequence[str], number: int) -> str | None:
    """Who evaluates and keeps the new state: in turn, since it costs the one who does it some of the next round."""
    here = {member.pk for member in standing.members or [] if member.state == MemberState.ACTIVE and member.instance}
    able = [member_id for member_id in accepted if member_id in here]
    return able[number % len(able)] if able else None


def _credit_members(seats: Sequence[Seat]) -> None:
    """A round that counts ends a row of failures, and is what the member's speed is measured by."""
    for seat in seats:
        seat.member.restarts = 0
        if seat.tokens and seat.compute_ms:
            seat.member.tokens_per_s = seat.tokens * 1000 / seat.compute_ms
    Member.objects.bulk_update([seat.member for seat in seats], ["restarts", "tokens_per_s"])


def _finish(job: Job, now: datetime) -> None:
    rows = Job.objects.filter(pk=job.pk)
    why = "all tokens are trained; the last state is evaluated and stored"
    if JOB_MACHINE.try_advance(rows, JobState.FINISHING, state_since=now, reason=why):
        job.state = JobState.FINISHING
        tell(job.pk, "finishing", f"All {job.tokens_sealed:,} tokens are sealed in {job.rounds_sealed} rounds", now)


def _tell_sealed(standing: Standing, manifest: Manifest, now: datetime) -> None:
    names = {seat.member_id: seat.member.lease.island.name for seat in standing.seats}
    counted = ", ".join(names[entry.member_id] for entry in manifest.entries)
    words = f"Round {manifest.round} sealed with {counted}: {manifest.tokens:,} tokens"
    if manifest.refused:
        left_out = ", ".join(f"{names[refusal.member_id]} ({refusal.reason})" for refusal in manifest.refused)
        words += f"; left out: {left_out}"
    tell(
        standing.job.pk,
        "sealed",
        words,
        now,
        round=manifest.round,
        tokens=manifest.tokens,
        members=[entry.member_id for entry in manifest.entries],
        refused={refusal.member_id: refusal.reason for refusal in manifest.refused},
    )


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.lease.island.name for member in members)


def spent_so_far_uusd(job_id: str) -> int:
    """What the meters of the job's leases have charged, or will with the next tick."""
    return metered_uusd(Lease.objects.filter(job_ref=job_id).values_list("pk", flat=True))


def sweep_rounds(now: datetime) -> int:
    """Rounds whose time is over while nobody polls; how many were looked into."""
    open_rounds = Round.objects.filter(state=RoundState.OPEN).exclude(job__state__in=ENDED).select_related("job")
    found = 0
    for current in open_rounds:
        if due(standing_of(current.job, round_=current), now) is not None:
            advance(current.job_id, now)
            found += 1
    return found
