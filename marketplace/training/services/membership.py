"""A job's places on leases: taken, restarted, asked to leave, and gone.

Invariant: every change is one compare-and-swap on the member's row with its event in the same transaction, and takes no
lock of the job: the round that waits for a member is looked at again by whoever polls or sweeps next, because what is
due follows from the rows and not from who was told. A generation only rises, and only its holder speaks for the member.
"""

from __future__ import annotations

from datetime import datetime

from django.core.signing import BadSignature, Signer
from django.db import transaction
from django.db.models import F

from marketplace.core.errors import Conflict, Unauthorised
from marketplace.core.wake import wake
from marketplace.trading.models import Lease, LeasePurpose
from marketplace.trading.selectors import LIVE
from marketplace.training.models import ENDED, MEMBER_MACHINE, Job, JobEvent, Member, MemberState

TICK = "scheduler.tasks.tick"
FAILURES_MAX = 5  # trainers that fail here in a row, without a round between: then the place is given up
REASON_LENGTH = 200
MESSAGE_LENGTH = 400

# No time in it: the order an agent is given stays the same from sync to sync, and the generation ends its validity.
_signer = Signer(salt="marketplace.training.member")


def member_token(member: Member) -> str:
    """What the member's trainer shows at every call: which place, and in which generation."""
    return _signer.sign(f"{member.pk}:{member.generation}")


def read_token(token: str) -> tuple[str, int]:
    """The member and generation a token was made for."""
    try:
        member_id, _, generation = _signer.unsign(token).partition(":")
        return member_id, int(generation)
    except (BadSignature, ValueError) as error:
        raise Unauthorised("this is no member's token") from error


def tell(job_id: str, kind: str, message: str, now: datetime, **detail: object) -> None:
    """One line of the job's history."""
    JobEvent.objects.create(job_id=job_id, at=now, kind=kind, message=message[:MESSAGE_LENGTH], detail=detail)


def place_member(job: Job, lease: Lease, now: datetime, why: str) -> Member:
    """Give the job a place on a lease of its own. The same lease again is the same place."""
    if lease.purpose != LeasePurpose.JOB or lease.job_ref != job.pk:
        raise Conflict("the lease is not this job's", code="not_of_this_job")
    with transaction.atomic():
        member, made = Member.objects.get_or_create(lease=lease, defaults={"job": job, "created_at": now})
        if made:
            if job.state in ENDED:
                raise Conflict("the job has ended", code="job_ended")
            words = f"{lease.island.name} with {lease.gpus} {'GPU' if lease.gpus == 1 else 'GPUs'}: {why}"
            tell(job.pk, "placed", words, now, member=member.pk, lease=lease.pk, island=lease.island_id)
    return member


def drain_member(member_id: str, why: str, now: datetime) -> Member:
    """Ask it to leave at the next safe point: its agent hears of it with the next sync. Once; repeated, nothing.

    One whose trainer has not joined has nothing to bring to an end, and is gone at once."""
    with transaction.atomic():
        rows = Member.objects.filter(pk=member_id)
        if rows.filter(state=MemberState.ASSIGNED, instance="").exists():
            member_gone(member_id, why, now, kind="left")
        moved = MEMBER_MACHINE.try_advance(rows, MemberState.DRAINING, draining_since=now)
        member = Member.objects.select_related("lease__island").get(pk=member_id)
        if moved:
            words = f"{member.lease.island.name} was asked to leave: {why}"
            tell(member.job_id, "draining", words, now, member=member_id)
    return member


def member_gone(member_id: str, why: str, now: datetime, *, kind: str = "lost") -> bool:
    """Nothing more will come of it: the round that waits for it does not any longer. False: it was gone already."""
    with transaction.atomic():
        rows = Member.objects.filter(pk=member_id)
        if not MEMBER_MACHINE.try_advance(rows, MemberState.GONE, gone_at=now, gone_why=why[:REASON_LENGTH]):
            return False
        member = Member.objects.select_related("lease__island").get(pk=member_id)
        tell(member.job_id, kind, f"{member.lease.island.name} left: {why}", now, member=member_id)
        wake(TICK)
    return True


def next_generation(member: Member, why: str, now: datetime, *, exit_code: int | None = None) -> bool:
    """Its trainer ended before its time: the agent starts another, and what the old one still says is refused.

    Guarded by the generation seen, so that a report repeated with every sync restarts it once."""
    with transaction.atomic():
        rows = Member.objects.filter(
            pk=member.pk, generation=member.generation, state__in=[MemberState.ASSIGNED, MemberState.ACTIVE]
        )
        moved = rows.update(
            state=MemberState.ASSIGNED,
            generation=F("generation") + 1,
            restarts=F("restarts") + 1,
            failed_at=now,
            failure_code=exit_code,
            failure=why[:REASON_LENGTH],
            instance="",
            phase="",
            state_round=None,
        )
        if moved and member.restarts + 1 >= FAILURES_MAX:
            words = f"its trainer failed {FAILURES_MAX} times in a row, the last time: {why}"
            return member_gone(member.pk, words, now)
        if moved:
            words = f"The trainer on {member.lease.island.name} is started again: {why}"
            tell(member.job_id, "restarted", words, now, member=member.pk, generation=member.generation + 1)
    return bool(moved)


def live_members(job_id: str) -> list[Member]:
    """Places that stand: their lease is live and they are not gone."""
    rows = Member.objects.filter(job_id=job_id, lease__state__in=LIVE).exclude(state=MemberState.GONE)
    return list(rows.select_related("lease__island").order_by("pk"))
