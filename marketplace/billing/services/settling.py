"""When what was paid in can be paid out: the payment becomes available at the provider, less their fee.

Invariant: a payment settles once, by the name of the provider's own booking of it.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.db import transaction

from marketplace.billing import gateway
from marketplace.billing.ledger import Entry, account, post
from marketplace.billing.models import AccountKind, TopUp, TopUpState, TransferKind
from marketplace.core.errors import Problem
from marketplace.core.ids import fact_id

logger = logging.getLogger(__name__)

CHECK_EVERY = timedelta(minutes=10)  # a card's money takes days
SWEEP_BATCH = 50


def settle_payments(now: datetime, every: timedelta = CHECK_EVERY) -> int:
    """Ask about payments that are not available yet; returns how many became so."""
    waiting = TopUp.objects.filter(state=TopUpState.PAID, available_at=None, checked_at__lte=now - every)
    settled = 0
    for top_up in waiting.order_by("checked_at")[:SWEEP_BATCH]:
        mine = TopUp.objects.filter(pk=top_up.pk, checked_at=top_up.checked_at, available_at=None)
        if not mine.update(checked_at=now):
            continue
        try:
            found = gateway.fetch_settlement(top_up.payment_ref or "")
        except Problem as problem:
            logger.warning("the settlement of %s is asked about again: %s", top_up.pk, problem)
            continue
        if found is not None and found.available:
            _settle(top_up, found, now)
            settled += 1
    return settled


@transaction.atomic
def _settle(top_up: TopUp, found: gateway.Settlement, now: datetime) -> None:
    pending, available = account(AccountKind.STRIPE_PENDING), account(AccountKind.STRIPE_AVAILABLE)
    net_uusd = found.gross_uusd - found.fee_uusd
    ref = top_up.payment_ref or ""
    entries = [Entry(fact_id("settle", found.id), TransferKind.SETTLE, available, pending, net_uusd, ref)]
    if found.fee_uusd:
        fees = account(AccountKind.STRIPE_FEES)
        entries.append(Entry(fact_id("card-fee", found.id), TransferKind.CARD_FEE, fees, pending, found.fee_uusd, ref))
    post(entries)
    TopUp.objects.filter(pk=top_up.pk, available_at=None).update(available_at=now)
