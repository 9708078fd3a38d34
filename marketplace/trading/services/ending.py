"""How a lease ends: minutes not begun are given back, the meter is closed, and what is left of the money returns.

Invariant: ending moves a lease once, whatever is repeated; the minute in progress stays sold, so it is never sold
twice. Between the end and its settlement the agent's last counter is still taken, and no more of it than was held until
the end: an agent counts on until its next call, and what is billed is the lesser of its counter and of that time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet

from marketplace.accounts.audit import record
from marketplace.billing.services.metering import close_meter
from marketplace.core.clock import minute_of, minute_start
from marketplace.core.errors import Busy, Conflict
from marketplace.core.wake import wake
from marketplace.trading.models import LEASE_MACHINE, ORDER_MACHINE, Lease, LeaseState, Order, OrderState
from marketplace.trading.selectors import LIVE
from marketplace.trading.services.locking import lock_lease, waiting_briefly
from marketplace.trading.services.trades import give_back
from marketplace.trading.windows import whole_minutes_until

logger = logging.getLogger(__name__)

TICK = "scheduler.tasks.tick"
# An agent that is alive tells its last counter within a few beats; what comes later than this many is not billed.
LAST_WORD_BEATS = 24
SYSTEM = "system"
AT_ITS_END = "window"
SWEEP_BATCH = 500


@dataclass(frozen=True)
class Swept:
    begun: int = 0
    ended: int = 0
    settled: int = 0


def last_word() -> timedelta:
    """How long the agent's last counter is waited for: two minutes at the usual interval."""
    return timedelta(milliseconds=LAST_WORD_BEATS * settings.FLEET_SYNC_MS)


def end_lease(lease_id: str, *, reason: str, failed: bool = False, by: str, now: datetime) -> Lease:
    """End a lease now; one that has ended stays as it ended. Before its first minute it is cancelled, and settled."""
    with waiting_briefly(), transaction.atomic():
        lease = lock_lease(lease_id)
        if lease.state in LEASE_MACHINE.terminal:
            return lease
        kept_until = min(max(whole_minutes_until(now), lease.start_min), lease.end_min)
        unbegun = kept_until == lease.start_min
        target = LeaseState.ENDED
        if failed:
            target = LeaseState.FAILED
        elif unbegun and lease.state == LeaseState.PENDING:
            target = LeaseState.CANCELLED
        ended_at = min(now, minute_start(lease.end_min))
        LEASE_MACHINE.advance(
            Lease.objects.filter(pk=lease.pk),
            target,
            ended_at=ended_at,
            end_reason=reason,
            settle_at=now if unbegun else now + last_word(),
        )
        give_back(lease, kept_until, now)
        withdraw_sales(lease, now)
        record(lease.organisation, by, f"lease.{target}", lease.pk, reason=reason, kept_until_min=kept_until)
        if unbegun:
            settle(lease.pk, now)
        wake(TICK)
        lease.refresh_from_db()
        return lease


def withdraw_sales(lease: Lease, now: datetime) -> None:
    """What a lease that ends had for sale is not for sale any longer. The lease is locked: nobody buys of it now."""
    rows = Order.objects.filter(of_lease=lease, state=OrderState.OPEN)
    for order in rows.select_related("organisation").select_for_update(of=("self",), no_key=True):
        why = "the lease ended"
        mine = Order.objects.filter(pk=order.pk)
        if ORDER_MACHINE.try_advance(mine, OrderState.CANCELLED, reason=why, closed_at=now, offered=[]):
            record(order.organisation, SYSTEM, f"order.{OrderState.CANCELLED}", order.pk, reason=why)


def lease_done(lease: Lease, now: datetime) -> Lease:
    """The work on it is over and the agent has told its last counter: end the lease if it has not, settle it now."""
    with transaction.atomic():
        end_lease(lease.pk, reason="released", by=SYSTEM, now=now)
        return settle(lease.pk, now)


def settle(lease_id: str, now: datetime) -> Lease:
    """Close the meter of a lease that has ended; the rest goes back to where it came from. Once."""
    with waiting_briefly(), transaction.atomic():
        lease = lock_lease(lease_id)
        if lease.settled_at is not None:
            return lease
        if lease.state not in LEASE_MACHINE.terminal:
            raise Conflict("a lease that goes on cannot be settled", code="lease_live")
        if lease.resold.filter(settled_at=None).exists():
            return lease  # it still pays for what it sold on; the sweep comes back when that is settled
        meter = close_meter(lease.pk, at=now)
        lease.settle_at, lease.settled_at = None, now
        lease.save(update_fields=["settle_at", "settled_at"])
        told = {"charged_uusd": meter.charged_uusd, "gpu_ms": meter.billable_gpu_ms}
        record(lease.organisation, SYSTEM, "lease.settled", lease.pk, **told)
        return lease


def sweep_leases(now: datetime) -> Swept:
    """What time alone does: leases begin, end and are settled. Each in a transaction of its own, so that one which
    waits for a lock holds up no other; what was not done is found by the next sweep."""
    now_min = minute_of(now)
    begins = Lease.objects.filter(state=LeaseState.PENDING, start_min__lte=now_min)
    begun = _each(begins, _begin)
    over = Lease.objects.filter(state__in=LIVE, end_min__lte=now_min)
    ended = _each(over, lambda lease_id: end_lease(lease_id, reason=AT_ITS_END, by=SYSTEM, now=now))
    goes_on = Lease.objects.filter(upstream=OuterRef("pk"), settled_at=None)
    due = Lease.objects.filter(~Exists(goes_on), settle_at__lte=now)
    settled = _each(due, lambda lease_id: settle(lease_id, now))
    return Swept(begun, ended, settled)


def _each(leases: QuerySet[Lease], act: Callable[[str], object]) -> int:
    done = 0
    for lease_id in list(leases.order_by("pk").values_list("pk", flat=True)[:SWEEP_BATCH]):
        try:
            act(lease_id)
        except Busy as busy:
            logger.info("lease %s is left to the next sweep: %s", lease_id, busy.message)
        else:
            done += 1
    return done


def _begin(lease_id: str) -> None:
    with waiting_briefly(), transaction.atomic():
        lease = lock_lease(lease_id)
        if LEASE_MACHINE.try_advance(Lease.objects.filter(pk=lease_id), LeaseState.ACTIVE):
            record(lease.organisation, SYSTEM, "lease.begun", lease_id)
