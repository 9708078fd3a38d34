"""Where jobs take part in an agent's sync: what it is to train, and what its trainers came to.

Invariant: inside the sync's transaction only members' rows are changed, each by compare-and-swap; what locks a lease
or a job waits for the commit, so that no sync and no seal wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial

from django.db import transaction

from marketplace.core.clock import minute_of, minute_start, to_ms
from marketplace.core.errors import Problem
from marketplace.fleet.models import Agent, Island, IslandState
from marketplace.trading.models import Lease, LeasePurpose
from marketplace.trading.selectors import LIVE
from marketplace.trading.services import end_lease, lease_done
from marketplace.training.models import Member, MemberState
from marketplace.training.services.membership import REASON_LENGTH, member_gone, member_token, next_generation
from worker_agent.protocol import Assignment, ProcessReport, TrainOrder

logger = logging.getLogger(__name__)

# As for reservations: the agent knows before it begins, and starts in time whatever the network does.
AHEAD = timedelta(minutes=2)
SYSTEM = "system"


def assignments(island: Island, now: datetime) -> list[Assignment]:
    """What the island is to train. A member that is gone is not in the list, and so its process must not run."""
    members = (
        Member.objects.filter(
            lease__island=island,
            lease__state__in=LIVE,
            lease__start_min__lte=minute_of(now + AHEAD),
            lease__end_min__gt=minute_of(now),
        )
        .exclude(state=MemberState.GONE)
        .select_related("lease")
        .order_by("lease_id")
    )
    return [
        Assignment(
            id=member.lease_id,
            generation=member.generation,
            kind="train",
            gpus=member.lease.gpus,
            start_at_ms=to_ms(minute_start(member.lease.start_min)),
            stop_at_ms=to_ms(minute_start(member.lease.end_min)),
            train=TrainOrder(
                job_id=member.job_id,
                member_id=member.pk,
                generation=member.generation,
                member_token=member_token(member),
                # Posed GPUs are CPU slots: more processes on them would only share the same cores.
                nproc=1 if island.simulated else member.lease.gpus,
            ),
            drain=member.state == MemberState.DRAINING,
        )
        for member in members
    ]


def take_processes(agent: Agent, reports: Sequence[ProcessReport], now: datetime) -> None:
    """Trainers that ended: the place goes to the next generation, or is given up where it was to end anyway."""
    ended = {report.assignment_id: report for report in reports if report.state in ("exited", "failed")}
    if ended:
        found = Member.objects.filter(lease__in=list(ended), lease__island=agent.island_id)
        for member in found.exclude(state=MemberState.GONE).select_related("lease__island").order_by("pk"):
            _take_end(agent, member, ended[member.lease_id], now)
    running = {report.assignment_id for report in reports} - ended.keys()
    _close_accounts(agent, running, now)


def _take_end(agent: Agent, member: Member, report: ProcessReport, now: datetime) -> None:
    if report.generation != member.generation or member.lease.state not in LIVE:
        return
    if member.state == MemberState.DRAINING or agent.draining:
        member_gone(member.pk, "it has ended as it was asked to", now, kind="left")
        _after_commit(end_lease, member.lease_id, reason="released", by=f"agent:{agent.pk}", now=now)
        return
    code = "" if report.exit_code is None else f" with code {report.exit_code}"
    why = report.message or f"its trainer ended{code}"
    next_generation(member, why[:REASON_LENGTH], now, exit_code=report.exit_code)


def _close_accounts(agent: Agent, running: set[str], now: datetime) -> None:
    """Leases of jobs that have ended and of which nothing runs any more: usage is taken before processes, so the last
    counter is in, and the rest of the money need not wait."""
    leases = Lease.objects.filter(island=agent.island_id, purpose=LeasePurpose.JOB, settle_at__isnull=False)
    for lease in leases.exclude(pk__in=running).order_by("pk"):
        _after_commit(lease_done, lease, now=now)


def _after_commit(act: Callable[..., object], *args: object, **terms: object) -> None:
    """Never fails the sync that caused it: what was not done now is found by the sweep."""
    transaction.on_commit(partial(_try, act, *args, **terms))


def _try(act: Callable[..., object], *args: object, **terms: object) -> None:
    try:
        act(*args, **terms)
    except Problem as problem:
        logger.info("left to the sweep: %s", problem.message)


def sweep_members(now: datetime) -> int:
    """Level with the truth, whatever was missed: a member without a live lease or island is gone, and a lease whose
    member is gone ends. Returns how many changed."""
    changed = 0
    orphans = Member.objects.exclude(state=MemberState.GONE).exclude(lease__state__in=LIVE)
    for member in orphans.select_related("lease").order_by("pk"):
        changed += member_gone(member.pk, f"its lease ended ({member.lease.end_reason or 'window'})", now, kind="left")
    lost = Member.objects.exclude(state=MemberState.GONE).filter(lease__island__state=IslandState.LOST)
    for member_id in lost.order_by("pk").values_list("pk", flat=True):
        changed += member_gone(member_id, "its island is lost", now)
    idle = Member.objects.filter(state=MemberState.GONE, lease__state__in=LIVE).select_related("lease__island")
    for member in idle.order_by("pk"):
        failed = member.lease.island.state == IslandState.LOST
        reason = "island_lost" if failed else "released"
        try:
            end_lease(member.lease_id, reason=reason, failed=failed, by=SYSTEM, now=now)
            changed += 1
        except Problem as problem:
            logger.info("lease %s is left to the next sweep: %s", member.lease_id, problem.message)
    return changed
