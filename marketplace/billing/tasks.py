"""Wake-ups of billing. Each is safe to lose and to repeat."""

from __future__ import annotations

from celery import shared_task

from marketplace.billing.services import inbox
from marketplace.billing.services.audits import run_audit
from marketplace.billing.services.card_refunds import sweep_refunds
from marketplace.billing.services.maturing import mature_earnings, release_reserves
from marketplace.billing.services.payouts import sweep_payouts
from marketplace.billing.services.settling import settle_payments
from marketplace.billing.services.ticking import capture_due
from marketplace.billing.services.topups import reconcile_top_ups
from marketplace.core.clock import database_now


@shared_task(name=inbox.TASK)
def drain_inbox() -> None:
    """Act on what the payment provider told, and ask it where it told nothing."""
    inbox.drain(database_now())
    reconcile_top_ups(database_now())


@shared_task(name="marketplace.billing.tasks.meter")
def meter() -> None:
    """What agents counted becomes money."""
    capture_due(database_now())


@shared_task(name="marketplace.billing.tasks.pay")
def pay() -> None:
    """Money becomes available, goes back to cards and out to sellers."""
    now = database_now()
    settle_payments(now)
    sweep_refunds(now)
    sweep_payouts(now)


@shared_task(name="marketplace.billing.tasks.mature")
def mature() -> None:
    """What was earned becomes payable once its dispute window is over."""
    now = database_now()
    mature_earnings(now)
    release_reserves(now)


@shared_task(name="marketplace.billing.tasks.audit")
def audit() -> None:
    """Every invariant, on the record; what is broken is an error in the log."""
    run_audit(database_now())
