"""Cash that was not spent goes back to the cards it came from: the newest payment first, since it can be refunded
longest.

Invariant: the money pends from before the provider is asked until it has answered; over all refunds and disputes no
payment gives back more than it brought; one refund at the provider for each row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Sum

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.accounts.models import Organisation
from marketplace.billing import gateway
from marketplace.billing.ledger import Entry, account, lock, post
from marketplace.billing.models import (
    CARD_REFUND_MACHINE,
    AccountKind,
    CardRefund,
    CardRefundState,
    PaymentDispute,
    Phase,
    TopUp,
    TopUpState,
    TransferKind,
)
from marketplace.billing.services.freezing import is_frozen
from marketplace.core.errors import Busy, Conflict, InvalidInput, Problem
from marketplace.core.ids import fact_id
from marketplace.core.money import UUSD_PER_CENT, format_usd

logger = logging.getLogger(__name__)

SYSTEM = "system:refunds"
KEY_KEPT = timedelta(hours=23)
CHECK_SOON = timedelta(minutes=1)
SWEEP_BATCH = 50


def refund_cash(actor: Actor, amount_uusd: int, now: datetime) -> list[CardRefund]:
    """Give cash back to the cards it came from; one refund for each payment that is needed for it."""
    return send_or_leave([row.pk for row in start_refunds(actor, amount_uusd, now)], now)


def start_refunds(actor: Actor, amount_uusd: int, now: datetime) -> list[CardRefund]:
    """Note them and pend their money."""
    demand(actor, Action.PAY)
    if amount_uusd <= 0 or amount_uusd % UUSD_PER_CENT:
        raise InvalidInput.at("amount_uusd", "a card takes whole cents")
    if is_frozen(actor.organisation):
        raise Conflict("payments of this organisation are under dispute", code="frozen")
    return _begin(actor, amount_uusd, now)


def send_or_leave(keys: Sequence[str], now: datetime) -> list[CardRefund]:
    """Send them; while the provider does not answer, they are the sweep's."""
    for key in keys:
        try:
            send_refund(key, now)
        except Busy:
            continue
    return list(CardRefund.objects.filter(pk__in=keys).order_by("pk"))


@transaction.atomic
def _begin(actor: Actor, amount_uusd: int, now: datetime) -> list[CardRefund]:
    organisation = actor.organisation
    cash, available = account(AccountKind.BUYER_CASH, organisation), account(AccountKind.STRIPE_AVAILABLE)
    cash, available = lock(cash, available)
    if cash.available_uusd < amount_uusd:
        raise InvalidInput.at("amount_uusd", f"{format_usd(cash.available_uusd)} is there to give back")
    if available.available_uusd < amount_uusd:
        raise Conflict("what was paid in is still on its way to us: try again in a few days", code="not_available_yet")
    rows = []
    left_uusd = amount_uusd
    for top_up in TopUp.objects.filter(organisation=organisation, state=TopUpState.PAID).order_by("-created_at"):
        part_uusd = min(left_uusd, refundable_uusd(top_up))
        if part_uusd <= 0:
            continue
        row = CardRefund.objects.create(
            organisation=organisation,
            top_up=top_up,
            amount_uusd=part_uusd,
            created_by=actor.name,
            created_at=now,
            checked_at=now,
        )
        name = fact_id("card-refund", row.pk)
        post([Entry(name, TransferKind.CARD_REFUND, cash, available, part_uusd, row.pk, Phase.PENDING)])
        record(organisation, actor.name, "card_refund.created", row.pk, amount_uusd=part_uusd, top_up=top_up.pk)
        rows.append(row)
        left_uusd -= part_uusd
        if not left_uusd:
            return rows
    most = format_usd(amount_uusd - left_uusd)
    raise InvalidInput.at("amount_uusd", f"{most} came from cards that can still be given something back")


def refundable_uusd(top_up: TopUp) -> int:
    """What this payment may still give back."""
    alive = top_up.refunds.exclude(state=CardRefundState.FAILED).aggregate(total=Sum("amount_uusd"))["total"] or 0
    disputed = PaymentDispute.objects.filter(top_up=top_up).aggregate(total=Sum("amount_uusd"))["total"] or 0
    return max(0, top_up.amount_uusd - int(alive) - int(disputed))


def refundable_in_all_uusd(organisation: Organisation) -> int:
    return sum(map(refundable_uusd, TopUp.objects.filter(organisation=organisation, state=TopUpState.PAID)))


def send_refund(key: str, now: datetime) -> CardRefund:
    """Ask for the refund and follow the answer. Raises Busy while there is none; the sweep asks again."""
    row = CardRefund.objects.select_related("top_up").get(pk=key)
    if row.state != CardRefundState.CREATED:
        return row
    payment_ref = row.top_up.payment_ref or ""
    try:
        if row.refund_id is not None:
            sent = gateway.fetch_refund(row.refund_id)
        else:
            known = gateway.find_refund(key, payment_ref) if now - row.created_at > KEY_KEPT else None
            sent = known or gateway.send_refund(key, payment_ref, row.amount_uusd)
    except Conflict as refused:
        if refused.code != gateway.REFUSED:
            raise
        return _end(key, CardRefundState.FAILED, None, refused.message, now)
    if sent.failed:
        return _end(key, CardRefundState.FAILED, sent.id, "the card's bank did not take it", now)
    if sent.done:
        return _end(key, CardRefundState.PAID, sent.id, "", now)
    CardRefund.objects.filter(pk=key, refund_id=None).update(refund_id=sent.id, checked_at=now)
    return row


def follow_refund(refund_id: str, now: datetime) -> CardRefund | None:
    """What the provider says of a refund of ours; None for one that is not."""
    row = CardRefund.objects.filter(pk=gateway.fetch_refund(refund_id).ref).first()
    return None if row is None else send_refund(row.pk, now)


def sweep_refunds(now: datetime) -> int:
    sent = 0
    waiting = CardRefund.objects.filter(state=CardRefundState.CREATED, checked_at__lte=now - CHECK_SOON)
    for row in waiting.order_by("checked_at")[:SWEEP_BATCH]:
        if not CardRefund.objects.filter(pk=row.pk, checked_at=row.checked_at).update(checked_at=now):
            continue
        try:
            send_refund(row.pk, now)
            sent += 1
        except Problem as problem:
            logger.warning("card refund %s is tried again: %s", row.pk, problem.message)
    return sent


@transaction.atomic
def _end(key: str, state: CardRefundState, refund_id: str | None, why: str, now: datetime) -> CardRefund:
    row = CardRefund.objects.select_for_update(no_key=True, of=("self",)).select_related("organisation").get(pk=key)
    if row.state != CardRefundState.CREATED:
        return row
    phase = Phase.CONFIRM if state == CardRefundState.PAID else Phase.VOID
    cash, available = account(AccountKind.BUYER_CASH, row.organisation), account(AccountKind.STRIPE_AVAILABLE)
    name, pending = fact_id("card-refund", key, phase), fact_id("card-refund", key)
    post([Entry(name, TransferKind.CARD_REFUND, cash, available, row.amount_uusd, key, phase, pending)])
    moved = CardRefund.objects.filter(pk=key)
    CARD_REFUND_MACHINE.advance(
        moved, state, refund_id=refund_id or row.refund_id, problem=why[:200], settled_at=now, checked_at=now
    )
    record(row.organisation, SYSTEM, f"card_refund.{state}", key, why=why)
    row.refresh_from_db()
    return row
