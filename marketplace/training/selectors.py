"""What is read of jobs: their money, their rounds as points of a curve, their islands as lanes.

Invariant: a job is reached through its organisation, so another's looks like none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Count, F, Prefetch, Q, QuerySet, Sum
from django.db.models.functions import Greatest, Mod

from marketplace.accounts.models import Organisation
from marketplace.billing.models import AccountKind, LedgerAccount, Meter
from marketplace.core.errors import NotFound
from marketplace.trading.models import Lease
from marketplace.trading.selectors import LIVE
from marketplace.training.models import Artifact, ArtifactKind, Job, Member, MemberState, Round, RoundState, Seat

HERE = (MemberState.ASSIGNED, MemberState.ACTIVE, MemberState.DRAINING)


@dataclass(frozen=True)
class Money:
    """Of one job, micro-USD: budget = spent + committed + free, and what has been given back."""

    budget_uusd: int
    spent_uusd: int  # charged for what was delivered
    committed_uusd: int  # held in its leases' escrows, not charged yet
    free_uusd: int  # held for it, in no lease


def money_of(jobs: Sequence[Job]) -> dict[str, Money]:
    """For many jobs at once, by id, in three queries."""
    ids = [job.pk for job in jobs]
    lease_job = dict(Lease.objects.filter(job_ref__in=ids).values_list("pk", "job_ref"))
    spent: dict[str, int] = dict.fromkeys(ids, 0)
    for lease_id, charged in Meter.objects.filter(pk__in=lease_job).values_list("pk", "charged_uusd"):
        spent[lease_job[lease_id]] += charged
    committed: dict[str, int] = dict.fromkeys(ids, 0)
    free: dict[str, int] = dict.fromkeys(ids, 0)
    for account in LedgerAccount.objects.filter(kind=AccountKind.ESCROW, ref__in=[*ids, *lease_job]):
        if account.ref in free:
            free[account.ref] += account.available_uusd
        else:
            committed[lease_job[account.ref]] += account.available_uusd
    return {job.pk: Money(job.budget_uusd, spent[job.pk], committed[job.pk], free[job.pk]) for job in jobs}


def spent_uusd(job_id: str) -> int:
    leases = Lease.objects.filter(job_ref=job_id).values("pk")
    return Meter.objects.filter(pk__in=leases).aggregate(total=Sum("charged_uusd"))["total"] or 0


def jobs_of(organisation: Organisation) -> QuerySet[Job]:
    """Newest first, each with how many islands it has now."""
    here = Q(members__state__in=HERE, members__lease__state__in=LIVE)
    return (
        Job.objects.filter(organisation=organisation)
        .annotate(islands_now=Count("members", filter=here, distinct=True))
        .order_by("-created_at", "-id")
    )


def job_for(organisation: Organisation, job_id: str) -> Job:
    job = jobs_of(organisation).filter(pk=job_id).first()
    if job is None:
        raise NotFound("there is no such job")
    return job


def rounds_of(job: Job) -> QuerySet[Round]:
    """Sealed rounds in order, each with its seats and whose they were."""
    seats = Seat.objects.select_related("member__lease__island").order_by("member_id")
    sealed = Round.objects.filter(job=job, state=RoundState.SEALED)
    return sealed.prefetch_related(Prefetch("seats", queryset=seats)).order_by("number")


def thinned(rounds: QuerySet[Round], points: int) -> QuerySet[Round]:
    """Rounds for a picture: of each job at most about twice `points`, evenly, and always the last."""
    every = Greatest(1, F("job__rounds_sealed") / points)
    return rounds.annotate(beside=Mod(F("number"), every)).filter(
        Q(beside=0) | Q(number=F("job__rounds_sealed") - 1), state=RoundState.SEALED
    )


def open_round_of(job: Job) -> Round | None:
    seats = Seat.objects.select_related("member__lease__island").order_by("member_id")
    opened = Round.objects.filter(job=job, state=RoundState.OPEN)
    return opened.prefetch_related(Prefetch("seats", queryset=seats)).first()


def members_of(job: Job) -> QuerySet[Member]:
    return Member.objects.filter(job=job).select_related("lease__island__gpu").order_by("created_at", "id")


def results_of(job: Job) -> QuerySet[Artifact]:
    """What a customer wants to keep: checkpoints, the newest first. Payloads are the run's own affair."""
    kept = Artifact.objects.filter(job=job, kind=ArtifactKind.SNAPSHOT, stored_at__isnull=False)
    return kept.order_by("-round_number", "-created_at")


def uploads_of(organisation: Organisation) -> QuerySet[Artifact]:
    return Artifact.objects.filter(organisation=organisation, job=None).order_by("-created_at", "-id")


def artifact_for(organisation: Organisation, artifact_id: str) -> Artifact:
    artifact = Artifact.objects.filter(organisation=organisation, pk=artifact_id).first()
    if artifact is None:
        raise NotFound("there is no such artifact")
    return artifact
