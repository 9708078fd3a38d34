"""A job from its submission to its last cent: submitted, cancelled, advanced, stopped.

Invariant: the whole budget is held when the job is submitted, everything it rents is paid from there, and what is left
goes back once every lease of it is settled: a job cannot cost more than its budget. Its state moves by compare-and-swap
with one event in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, QuerySet

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.accounts.models import Organisation
from marketplace.billing.services.holds import cash, escrow, hold, release
from marketplace.catalog.models import GpuModel
from marketplace.core.errors import Busy, Conflict, FieldProblem, InvalidInput, NotFound
from marketplace.core.money import format_usd
from marketplace.core.wake import wake
from marketplace.trading.models import Lease
from marketplace.trading.selectors import LIVE
from marketplace.trading.services import end_lease
from marketplace.training.models import (
    ENDED,
    JOB_MACHINE,
    Artifact,
    ArtifactKind,
    Job,
    JobState,
    Member,
    MemberState,
    Round,
    RoundState,
    job_id,
)
from marketplace.training.services.membership import TICK, member_gone, tell
from marketplace.training.spec import artifacts_named, parameters_of, run_of_spec
from worker_agent.protocol import EXIT_SPEC, EXIT_UNREACHABLE

BY = "system:jobs"
# From the last seal: evaluating and storing the last state takes a model's size, not a round.
FINISH_LIMIT = timedelta(minutes=10)
AT_ONCE = 200
REJECTIONS_MAX = 2  # trainers that refuse what was submitted, before the job is ended
FAILURES_IN_ALL = 12  # trainers of one job that fail without a round between, wherever
GOING = (JobState.QUEUED, JobState.RUNNING, JobState.WAITING)
HERE = (MemberState.ASSIGNED, MemberState.ACTIVE, MemberState.DRAINING)


def submit_job(actor: Actor, spec: dict[str, Any], now: datetime, *, key: str | None = None) -> Job:
    """Take a job whose spec the form has checked, and hold its budget. Refused, it leaves nothing behind.

    `key` is the id the job shall have, one of ours: sent twice, it is one job."""
    demand(actor, Action.WORK)
    made = _sent_before(actor, key)
    if made is not None:
        return made
    _demand_known_gpus(spec)
    blobs = _blobs_of(actor.organisation, spec)
    try:
        with transaction.atomic():
            return _take(actor, spec, blobs, key or job_id(), now)
    except IntegrityError as error:
        made = _sent_before(actor, key)  # at the same moment
        if made is None:
            raise Conflict("this form was used for another job", code="ticket_used") from error
        return made


def _sent_before(actor: Actor, key: str | None) -> Job | None:
    return None if key is None else Job.objects.filter(organisation=actor.organisation, pk=key).first()


def _take(actor: Actor, spec: dict[str, Any], blobs: dict[str, tuple[str, int]], key: str, now: datetime) -> Job:
    run = run_of_spec(spec, job_id=key, blobs=blobs)
    gpus = spec["gpus"]
    job = Job.objects.create(
        id=key,
        organisation=actor.organisation,
        name=spec["name"],
        spec=_plain(spec),
        run=msgspec.to_builtins(run),
        state_since=now,
        reason="waiting for the scheduler",
        budget_uusd=spec["budget_uusd"],
        deadline_at=spec["deadline_at"],
        min_islands=spec["min_islands"],
        max_islands=spec["max_islands"],
        gpus_per_island=gpus["per_island"],
        allowed_gpus=gpus["allowed"],
        min_vram_gib=gpus["min_vram_gib"],
        parameters=parameters_of(spec["model"]),
        tokens_target=spec["tokens"],
        created_by=actor.name,
        created_at=now,
    )
    hold(job.pk, actor.organisation, job.budget_uusd)
    record(actor.organisation, actor.name, "job.submitted", job.pk, budget_uusd=job.budget_uusd)
    tell(job.pk, "submitted", f"Submitted; {format_usd(job.budget_uusd)} are held for it", now)
    wake(TICK)
    return job


def cancel_job(actor: Actor, key: str, now: datetime) -> Job:
    """End it now: its islands are given back, what it did not use returns once they are settled. Twice is once."""
    demand(actor, Action.WORK)
    with transaction.atomic():
        job = Job.objects.select_for_update(no_key=True).filter(organisation=actor.organisation, pk=key).first()
        if job is None:
            raise NotFound("there is no such job")
        if job.state == JobState.CANCELLED:
            return job
        if job.state in ENDED:
            raise Conflict(f"the job has {job.get_state_display().lower()}", code="job_ended")
        _end(job, JobState.CANCELLED, f"cancelled by {actor.name}", now)
        record(actor.organisation, actor.name, "job.cancelled", key)
    job.refresh_from_db()
    return job


def note_wait(key: str, reason: str, why: str, now: datetime) -> None:
    """Why nothing more is done for a job; told when it changes. One that began and can no longer be paid is stopped."""
    with transaction.atomic():
        job = Job.objects.select_for_update(no_key=True).filter(pk=key, state__in=GOING).first()
        if job is None:
            return
        if reason == "budget" and job.rounds_sealed and not _has_places(job):
            _end(job, JobState.STOPPED, f"the budget does not bring it to its end: {why}", now)
            return
        words = why[:300]
        if job.reason != words:
            Job.objects.filter(pk=key).update(reason=words)
            tell(key, "decision", f"{words[:1].upper()}{words[1:]}", now, reason=reason)


def advance_jobs(now: datetime) -> int:
    """What follows from the rows alone; returns how many jobs moved. Each job in a transaction of its own."""
    places = Member.objects.filter(job=OuterRef("pk"), state__in=HERE, lease__state__in=LIVE)
    working = places.filter(state__in=[MemberState.ACTIVE, MemberState.DRAINING])
    failed = Member.objects.filter(job=OuterRef("pk"), failed_at__isnull=False)
    jobs = Job.objects.order_by("pk")
    return (
        _each(jobs.filter(state__in=GOING, deadline_at__lte=now), lambda job: _past_deadline(job, now))
        + _each(
            jobs.filter(Exists(working), state__in=[JobState.QUEUED, JobState.WAITING]), lambda job: _runs(job, now)
        )
        + _each(jobs.filter(~Exists(places), state=JobState.RUNNING), lambda job: _waits(job, now))
        + _each(jobs.filter(Exists(failed), state__in=GOING), lambda job: _gives_up(job, now))
        + _each(jobs.filter(state=JobState.FINISHING), lambda job: _finish(job, now))
        + _each(jobs.filter(state__in=ENDED, settled_at=None), lambda job: _settle(job, now))
    )


def fail_job(job: Job, why: str, now: datetime) -> None:
    """End a job that cannot go on, whatever it is given. The caller holds its row."""
    _end(job, JobState.FAILED, why, now)


def _runs(job: Job, now: datetime) -> bool:
    return _move(job, JobState.RUNNING, "its islands train", now, started_at=job.started_at or now)


def _waits(job: Job, now: datetime) -> bool:
    return _move(job, JobState.WAITING, "it has no island now", now)


def _gives_up(job: Job, now: datetime) -> bool:
    """A job that fails wherever it is placed is ended before it costs its owner the budget.

    It has to fail twice for what was submitted, and only as long as nothing was trained: an island that says so of a
    job that trains elsewhere is wrong about the job."""
    sealed = Round.objects.filter(job=job, state=RoundState.SEALED).order_by("-number").first()
    since = job.created_at if sealed is None or sealed.sealed_at is None else sealed.sealed_at
    failed = list(Member.objects.filter(job=job, failed_at__gt=since).order_by("-failed_at"))
    rejected = [member for member in failed if member.failure_code == EXIT_SPEC]
    if sealed is None and sum(member.restarts for member in rejected) >= REJECTIONS_MAX:
        return _end(job, JobState.FAILED, f"what was submitted cannot be trained: {rejected[0].failure}", now)
    faults = [member for member in failed if member.failure_code != EXIT_UNREACHABLE]
    count = sum(member.restarts for member in faults)
    if count >= FAILURES_IN_ALL:
        why = f"its trainers failed {count} times without a round between, the last time: {faults[0].failure}"
        return _end(job, JobState.FAILED, why, now)
    return False


def _past_deadline(job: Job, now: datetime) -> bool:
    why = "its deadline has passed; the last sealed state is kept"
    return _end(job, JobState.STOPPED, why, now)


def _finish(job: Job, now: datetime) -> bool:
    """Its tokens are sealed: it has succeeded once the last state is stored, and the trainers had time to leave."""
    stored = Artifact.objects.filter(
        job=job, kind=ArtifactKind.SNAPSHOT, round_number=job.rounds_sealed, stored_at__isnull=False
    ).exists()
    late = now - job.state_since >= FINISH_LIMIT
    if _has_places(job) and not late:
        return False
    if stored:
        return _end(job, JobState.SUCCEEDED, f"all {job.tokens_sealed:,} tokens are trained", now)
    return _end(job, JobState.FAILED, "all tokens were trained, but nobody stored the last state", now)


def _settle(job: Job, now: datetime) -> bool:
    """Give back what is left of the budget, once nothing can be charged to it any more."""
    if Lease.objects.filter(job_ref=job.pk, settled_at=None).exists():
        return False
    if not Job.objects.filter(pk=job.pk, settled_at=None).update(settled_at=now):
        return False
    returned_uusd = release(escrow(job.pk, job.organisation), cash(job.organisation))
    words = f"All its leases are settled; {format_usd(returned_uusd)} of its budget went back"
    tell(job.pk, "settled", words, now, returned_uusd=returned_uusd)
    return True


def _end(job: Job, to: JobState, why: str, now: datetime) -> bool:
    if not _move(job, to, why, now, ended_at=now):
        return False
    for member in Member.objects.filter(job=job).exclude(state=MemberState.GONE):
        member_gone(member.pk, f"the job has {to.label.lower()}", now, kind="left")
    for lease_id in Lease.objects.filter(job_ref=job.pk, state__in=LIVE).order_by("pk").values_list("pk", flat=True):
        end_lease(lease_id, reason=f"job_{to}", by=BY, now=now)
    return True


def _move(job: Job, to: JobState, why: str, now: datetime, **fields: object) -> bool:
    rows = Job.objects.filter(pk=job.pk)
    if not JOB_MACHINE.try_advance(rows, to, state_since=now, reason=why, **fields):
        return False
    kind = "ended" if to in ENDED else "state"
    tell(job.pk, kind, f"{to.label}: {why}", now, state=to)
    return True


def _each(jobs: QuerySet[Job], act: Callable[[Job], bool]) -> int:
    moved = 0
    for key in list(jobs.values_list("pk", flat=True)[:AT_ONCE]):
        try:
            with transaction.atomic():
                moved += act(Job.objects.select_for_update(no_key=True).select_related("organisation").get(pk=key))
        except Busy:
            continue  # a lock of one of its leases is held: the next sweep
    return moved


def _has_places(job: Job) -> bool:
    return Member.objects.filter(job=job, state__in=HERE, lease__state__in=LIVE).exists()


def _demand_known_gpus(spec: dict[str, Any]) -> None:
    allowed = spec["gpus"]["allowed"]
    if allowed is None:
        return
    known = set(GpuModel.objects.filter(pk__in=allowed).values_list("pk", flat=True))
    problems = [
        FieldProblem(f"gpus.allowed.{index}", f"there is no GPU {name}")
        for index, name in enumerate(allowed)
        if name not in known
    ]
    if problems:
        raise InvalidInput("some fields are not right", fields=problems)


def _blobs_of(organisation: Organisation, spec: dict[str, Any]) -> dict[str, tuple[str, int]]:
    named = artifacts_named(spec)
    found = Artifact.objects.filter(pk__in=named, organisation=organisation, job=None)
    stored = {each.pk: (each.digest, each.size_bytes) for each in found if each.stored_at is not None}
    problems = [
        FieldProblem(field, "there is no uploaded artifact of this id")
        for artifact_id, field in named.items()
        if artifact_id not in stored
    ]
    if problems:
        raise InvalidInput("some fields are not right", fields=problems)
    return stored


def _plain(spec: dict[str, Any]) -> dict[str, Any]:
    deadline = spec["deadline_at"]
    return {**spec, "deadline_at": deadline.isoformat() if deadline else None}
