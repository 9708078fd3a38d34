"""The inbox of the payment provider's messages: taken at once, acted on afterwards, kept until that has succeeded.

Invariant: a message is stored once and only ever makes us ask the provider. One that fails is tried again, each time
later; it is taken up before it is acted on, so that one which breaks us does not stop those behind it.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from marketplace.billing.gateway import Message
from marketplace.billing.models import SellerAccount, StripeEvent, TopUp
from marketplace.billing.services.card_refunds import follow_refund
from marketplace.billing.services.disputes import follow_dispute
from marketplace.billing.services.payouts import follow_transfer, refresh_seller_account
from marketplace.billing.services.topups import settle_top_up
from marketplace.core.errors import Problem
from marketplace.core.wake import wake

logger = logging.getLogger(__name__)

TASK = "marketplace.billing.tasks.drain_inbox"
CHECKOUT = "checkout.session."
PAYMENT = "payment_intent."
ACCOUNT = "account."
TRANSFER = "transfer."
REFUND = ("refund.", "charge.refund.")
DISPUTE = "charge.dispute."
OURS = (CHECKOUT, PAYMENT, ACCOUNT, TRANSFER, *REFUND, DISPUTE)
RETRY_FIRST, RETRY_MOST = timedelta(seconds=5), timedelta(hours=1)
BATCH = 100


def take(message: Message, now: datetime) -> bool:
    """Store a verified message and wake who acts on it; False: it is known already."""
    of_ours = message.kind.startswith(OURS)
    _, new = StripeEvent.objects.get_or_create(
        id=message.id,
        defaults={
            "kind": message.kind[:100],
            "object_id": message.object_id,
            "order_ref": message.order_ref,
            "received_at": now,
            "due_at": now,
            "processed_at": None if of_ours else now,
        },
    )
    if new and of_ours:
        wake(TASK)
    return new


def drain(now: datetime) -> int:
    """Act on every message that is due; returns how many were done."""
    done = 0
    for event in StripeEvent.objects.filter(processed_at=None, due_at__lte=now).order_by("due_at")[:BATCH]:
        pause = min(RETRY_FIRST * 2 ** min(event.attempts, 20), RETRY_MOST)
        mine = StripeEvent.objects.filter(pk=event.pk, processed_at=None, attempts=event.attempts)
        if not mine.update(attempts=event.attempts + 1, due_at=now + pause):
            continue
        rows = StripeEvent.objects.filter(pk=event.pk)
        try:
            said = _act(event, now)
        except Problem as problem:
            logger.warning("%s %s is kept for later: %s", event.kind, event.pk, problem)
            rows.update(last_error=str(problem)[:300])
        else:
            rows.update(processed_at=now, last_error=said)
            done += 1
    return done


def _act(event: StripeEvent, now: datetime) -> str:
    """Returns what there was to remark, if anything."""
    known: object
    if event.kind.startswith(ACCOUNT):
        row = SellerAccount.objects.select_related("organisation").filter(account_id=event.object_id).first()
        known = row and refresh_seller_account(row.organisation, now)
    elif event.kind.startswith(TRANSFER):
        known = follow_transfer(event.object_id, now)
    elif event.kind.startswith(REFUND):
        known = follow_refund(event.object_id, now)
    elif event.kind.startswith(DISPUTE):
        known = follow_dispute(event.object_id, now)
    else:
        known = _act_on_payment(event, now)
    return "" if known is not None else "nothing of ours"  # the provider's account also serves others


def _act_on_payment(event: StripeEvent, now: datetime) -> TopUp | None:
    is_checkout = event.kind.startswith(CHECKOUT)
    top_up = TopUp.objects.filter(pk=event.order_ref).first()
    if top_up is None and is_checkout:
        top_up = TopUp.objects.filter(checkout_id=event.object_id).first()
    if top_up is None:
        return None
    return settle_top_up(top_up.pk, now, checkout_id=event.object_id if is_checkout else "")
