"""Decisions to leases and places, each in a transaction of its own.

Invariant: a decision takes effect whole or not at all, under a hold that still stands; one that the world has outrun
is told on the job's page and dropped, because the next tick decides anew from what is then true.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from datetime import datetime

from django.db import transaction

from marketplace.core.clock import database_now, minute_start
from marketplace.core.errors import Problem
from marketplace.trading import services as trading
from marketplace.trading.models import Lease, LeasePurpose
from marketplace.training import services as training
from marketplace.training.models import Job, Member
from scheduler import lock
from scheduler.policy.state import Decision, Extend, Place, Release, Wait
from scheduler.reconcile import give_up_lost
from scheduler.snapshot import WANTING

logger = logging.getLogger(__name__)

BY = "system:scheduler"


def apply(decisions: Sequence[Decision], token: uuid.UUID) -> int:
    """Carry out what still can be; returns how many took effect."""
    done = 0
    for decision in decisions:
        now = database_now()
        try:
            with transaction.atomic():
                lock.demand(token, now)
                done += _carry_out(decision, now)
        except Problem as problem:
            if problem.code == "lock_lost":
                logger.warning("the hold was lost after %d of %d decisions", done, len(decisions))
                return done
            logger.info("%s was outrun: %s", decision, problem)
            training.note_wait(decision.job_id, problem.code, f"a decision was outrun: {problem.message}", now)
    return done


def _carry_out(decision: Decision, now: datetime) -> bool:
    # The job's row first: a cancellation that came before is seen, one that comes after finds what was done here.
    job = Job.objects.select_for_update(no_key=True).filter(pk=decision.job_id, state__in=WANTING).first()
    if job is None:
        return False
    if isinstance(decision, Place):
        return _place(job, decision, now)
    if isinstance(decision, Extend):
        end_at = minute_start(decision.until_min)
        trading.extend(decision.lease_id, end_at=end_at, by=BY, now=now)
        return True
    if isinstance(decision, Release):
        return _release(decision, now)
    return _wait(job, decision, now)


def _place(job: Job, decision: Place, now: datetime) -> bool:
    lease = trading.rent(
        job.organisation,
        island_id=decision.island_id,
        gpus=decision.gpus,
        end_at=minute_start(decision.until_min),
        max_price_uusd_per_gpu_hour=decision.price_uusd_per_gpu_hour,
        purpose=LeasePurpose.JOB,
        job_ref=job.pk,
        by=BY,
        now=now,
    )
    training.place_member(job, lease, now, decision.why)
    return True


def _release(decision: Release, now: datetime) -> bool:
    lease = Lease.objects.select_related("island").get(pk=decision.lease_id)
    if give_up_lost(lease, now):
        return True
    member = Member.objects.get(lease=lease)
    training.drain_member(member.pk, decision.why, now)
    return True


def _wait(job: Job, decision: Wait, now: datetime) -> bool:
    training.note_wait(job.pk, decision.reason, decision.why, now)
    return True
