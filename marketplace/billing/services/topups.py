"""Money in: a top-up is a row first, a payment page next, and a deposit when the provider says that it was paid.

1. `start_top_up` writes the row. 2. `open_payment` asks for the page, outside any transaction; asked again, it gets
the same page, because the row's id is the idempotency key. 3. `settle_top_up` asks the provider how the payment stands
and follows it. Webhooks and the sweep both end there, so that what a message says is never believed, and a lost,
repeated, late or reordered one changes nothing.
Invariant: one deposit a payment, in the transaction that makes the top-up paid; what was paid is what was asked for.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.urls import reverse

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.billing import gateway
from marketplace.billing.models import (
    TOP_UP_LEAST_UUSD,
    TOP_UP_MACHINE,
    TOP_UP_MOST_UUSD,
    TopUp,
    TopUpState,
)
from marketplace.billing.services.holds import deposit
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.money import UUSD_PER_CENT, format_usd

logger = logging.getLogger(__name__)

SYSTEM = "system:payments"
OPEN = (TopUpState.CREATED, TopUpState.PENDING)
# The provider closes a page after a day at most; ours closes before, so that a late retry is still within its limits.
PAGE_OPEN = timedelta(hours=23)
OPENABLE = timedelta(hours=22)
# A webhook comes within seconds. Who waits longer is asked about: every minute at first, then every ten.
CHECK_SOON, SOON, CHECK_LATER = timedelta(minutes=1), timedelta(minutes=20), timedelta(minutes=10)
SWEEP_BATCH = 20


def start_top_up(actor: Actor, *, amount_uusd: int, now: datetime, field: str = "amount_uusd") -> TopUp:
    """Note the wish to pay. `field` is what the caller named the amount, for the refusal."""
    demand(actor, Action.PAY)
    if amount_uusd % UUSD_PER_CENT:
        raise InvalidInput.at(field, "a card pays whole cents")
    if not TOP_UP_LEAST_UUSD <= amount_uusd <= TOP_UP_MOST_UUSD:
        least, most = format_usd(TOP_UP_LEAST_UUSD, 0), format_usd(TOP_UP_MOST_UUSD, 0)
        raise InvalidInput.at(field, f"choose between {least} and {most}")
    with transaction.atomic():
        top_up = TopUp.objects.create(
            organisation=actor.organisation,
            amount_uusd=amount_uusd,
            created_by=actor.name,
            created_at=now,
            checked_at=now,
        )
        record(actor.organisation, actor.name, "top_up.created", top_up.pk, amount_uusd=amount_uusd)
    return top_up


def open_payment(top_up_id: str, now: datetime) -> TopUp:
    """Get the page to pay on. Raises Busy while the provider does not answer; the sweep tries again by itself."""
    top_up = TopUp.objects.get(pk=top_up_id)
    if top_up.state != TopUpState.CREATED:
        return top_up
    if now - top_up.created_at > OPENABLE:
        return _expire_unopened(top_up, now)
    page = f"{settings.PUBLIC_URL}{reverse('billing:top_up', args=[top_up.pk])}"
    checkout = gateway.open_checkout(
        gateway.Order(
            ref=top_up.pk,
            amount_uusd=top_up.amount_uusd,
            expires_at=top_up.created_at + PAGE_OPEN,
            paid_url=f"{page}?back=paid",
            unpaid_url=f"{page}?back=unpaid",
        )
    )
    return _follow(top_up.pk, checkout, now)


def settle_top_up(top_up_id: str, now: datetime, checkout_id: str = "") -> TopUp:
    """Ask the provider and follow its answer. `checkout_id` is what a message named, for a row that does not know yet
    because the answer to its opening was lost."""
    top_up = TopUp.objects.get(pk=top_up_id)
    if top_up.state == TopUpState.PAID:
        return top_up
    known = top_up.checkout_id or checkout_id
    if not known:
        # To a repeated opening the provider answers what it answered first: the page as it was then.
        top_up = open_payment(top_up_id, now)
        known = top_up.checkout_id or ""
        if not known:
            return top_up
    return _follow(top_up.pk, gateway.fetch_checkout(known), now)


def reconcile_top_ups(now: datetime) -> int:
    """Ask about payments of which nothing was heard; returns how many. Each is asked about by one sweep at a time."""
    recent = Q(checked_at__lte=now - CHECK_SOON, created_at__gt=now - SOON)
    waiting = TopUp.objects.filter(recent | Q(checked_at__lte=now - CHECK_LATER), state__in=OPEN)
    asked = 0
    for top_up in waiting.order_by("checked_at")[:SWEEP_BATCH]:
        mine = TopUp.objects.filter(pk=top_up.pk, checked_at=top_up.checked_at).update(checked_at=now)
        if not mine:
            continue
        asked += 1
        try:
            settle_top_up(top_up.pk, now)
        except Problem as problem:
            logger.warning("%s could not be settled, it is asked about again: %s", top_up.pk, problem)
    return asked


@transaction.atomic
def _follow(top_up_id: str, checkout: gateway.Checkout, now: datetime) -> TopUp:
    """Move the top-up to where the provider says that the payment is."""
    top_up = TopUp.objects.select_for_update(no_key=True).get(pk=top_up_id)
    if top_up.state == TopUpState.PAID:
        return top_up
    rows = TopUp.objects.filter(pk=top_up.pk)
    known = {"checkout_id": checkout.id, "pay_url": checkout.pay_url or "", "checked_at": now}
    mismatch = _mismatch(top_up, checkout)
    if mismatch:
        # Whatever came is at the provider, and no customer's until a person has looked.
        if top_up.problem != mismatch:
            logger.error("%s: %s (%s, %s)", top_up.pk, mismatch, checkout.id, checkout.payment_ref)
            TOP_UP_MACHINE.try_advance(rows, TopUpState.FAILED)
            rows.update(problem=mismatch, checked_at=now)
            record(top_up.organisation, SYSTEM, "top_up.mismatched", top_up.pk, checkout=checkout.id, why=mismatch)
    elif checkout.paid_uusd is not None and checkout.payment_ref is not None:
        deposit(top_up.organisation, top_up.amount_uusd, checkout.payment_ref)
        paid = {"payment_ref": checkout.payment_ref, "problem": "", "settled_at": now}
        TOP_UP_MACHINE.advance(rows, TopUpState.PAID, **known, **paid)
        record(top_up.organisation, SYSTEM, "top_up.paid", top_up.pk, payment=checkout.payment_ref)
    elif checkout.expired:
        _end(top_up, TopUpState.EXPIRED, "The payment page expired. Nothing was charged.", known)
    elif not checkout.open and checkout.declined:
        _end(top_up, TopUpState.FAILED, checkout.declined, known)
    else:
        TOP_UP_MACHINE.try_advance(rows.filter(state=TopUpState.CREATED), TopUpState.PENDING, **known)
        rows.filter(state=TopUpState.PENDING).update(problem=(checkout.declined or "")[:200], **known)
    top_up.refresh_from_db()
    return top_up


def _mismatch(top_up: TopUp, checkout: gateway.Checkout) -> str:
    if checkout.order_ref != top_up.pk:
        return "The payment belongs to another order."
    amounts = {checkout.amount_uusd} | ({checkout.paid_uusd} if checkout.paid_uusd is not None else set())
    if amounts != {top_up.amount_uusd}:
        return "The amount at the payment provider is not the one asked for. We look into it."
    return ""


def _end(top_up: TopUp, to: TopUpState, why: str, known: dict[str, object]) -> None:
    if TOP_UP_MACHINE.try_advance(TopUp.objects.filter(pk=top_up.pk), to, problem=why[:200], **known):
        record(top_up.organisation, SYSTEM, f"top_up.{to}", top_up.pk, why=why)


@transaction.atomic
def _expire_unopened(top_up: TopUp, now: datetime) -> TopUp:
    _end(top_up, TopUpState.EXPIRED, "The payment page could not be opened in time.", {"checked_at": now})
    top_up.refresh_from_db()
    return top_up
