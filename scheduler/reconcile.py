"""What is believed against what is: the limits after which a place is given up, whatever was meant to happen.

Each rule is one function that finds its rows and mends them, each in a transaction of its own. Invariant: running a
rule again, or beside itself, changes nothing more. Together with `training.services.sweep_members`, which keeps places
and leases level with each other, every place and lease of a job has a rule that ends it, so none outlives what it is
for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet

from marketplace.core.errors import Busy
from marketplace.fleet.models import IslandState
from marketplace.trading import services as trading
from marketplace.trading.models import Lease
from marketplace.trading.selectors import LIVE
from marketplace.training import services as training
from marketplace.training.models import ENDED, Member, MemberState

logger = logging.getLogger(__name__)

BY = "system:scheduler"
AT_ONCE = 200
# A trainer that was asked to leave has this long to bring its round to an end.
DRAIN_LIMIT = timedelta(seconds=60)
# From the lease to the first call of its trainer: the agent's next sync, a process, a model's first state.
START_LIMIT = timedelta(seconds=180)


def reconcile(now: datetime) -> int:
    """All rules; returns how many rows they mended."""
    rules = (drained_members_leave_in_time, silent_starts_are_given_up, places_of_ended_jobs_are_given_back)
    return sum(rule(now) for rule in rules)


def give_up_lost(lease: Lease, now: datetime) -> bool:
    """End a job's lease on an island that is lost, and the place on it; False: the island is not lost."""
    if lease.island.state != IslandState.LOST:
        return False
    with transaction.atomic():
        for member in Member.objects.filter(lease=lease):
            training.member_gone(member.pk, "its agent is silent, the island counts as lost", now)
        trading.end_lease(lease.pk, reason="island_lost", failed=True, by=BY, now=now)
    return True


def drained_members_leave_in_time(now: datetime) -> int:
    """Who was asked to leave and has not by the limit is let go: its lease ends and its agent stops the trainer."""
    members = Member.objects.filter(state=MemberState.DRAINING, draining_since__lte=now - DRAIN_LIMIT)
    return _each(members, lambda member: _let_go(member, "it did not leave in time after it was asked to", now))


def silent_starts_are_given_up(now: datetime) -> int:
    """A place whose trainer never joined is not waited for longer than any start takes."""
    members = Member.objects.filter(state=MemberState.ASSIGNED, joined_at=None, created_at__lte=now - START_LIMIT)
    limit = f"{START_LIMIT.total_seconds():.0f} s"
    return _each(members, lambda member: _let_go(member, f"its trainer did not join within {limit}", now))


def places_of_ended_jobs_are_given_back(now: datetime) -> int:
    """What a decision took for a job in the moment it ended."""
    members = Member.objects.filter(job__state__in=ENDED, lease__state__in=LIVE)
    return _each(members, lambda member: _let_go(member, "the job has ended", now))


def _let_go(member: Member, why: str, now: datetime) -> bool:
    with transaction.atomic():
        training.member_gone(member.pk, why, now, kind="left")
        trading.end_lease(member.lease_id, reason="released", by=BY, now=now)
    return True


def _each(members: QuerySet[Member], mend: Callable[[Member], bool]) -> int:
    """Mend each; one whose lock is held is left to the next sweep."""
    mended = 0
    for member in members.order_by("pk")[:AT_ONCE]:
        try:
            mended += mend(member)
        except Busy as busy:
            logger.info("%s is left to the next sweep: %s", member, busy.message)
    return mended
