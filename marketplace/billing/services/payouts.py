"""Paying sellers: an account at the provider for each, and payouts of what has become payable.

1. `start_payout` writes the row and pends the money, in one transaction. 2. `send_payout` asks the provider for the
transfer, outside of any; asked again it is the same one, since the row's id is the key. 3. What the provider answers is
followed: sent posts the money, refused for good gives it back. A sweep does 2 and 3 for whatever was interrupted.
Invariant: one transfer a payout and one payout on its way a seller; nothing is paid out of money that is not there yet.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db import IntegrityError, transaction
from django.urls import reverse

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.accounts.models import Organisation
from marketplace.billing import gateway
from marketplace.billing.ledger import Entry, account, post
from marketplace.billing.models import (
    PAYOUT_MACHINE,
    AccountKind,
    LedgerAccount,
    Meter,
    Payout,
    PayoutState,
    Phase,
    SellerAccount,
    TransferKind,
)
from marketplace.billing.services.freezing import is_frozen
from marketplace.core.errors import Busy, Conflict, InsufficientFunds, Problem
from marketplace.core.ids import fact_id
from marketplace.core.money import floor_to_cents_uusd, format_usd

logger = logging.getLogger(__name__)

SYSTEM = "system:payouts"
WEEK = timedelta(days=7)
# The provider keeps a key for a day. After that a payout is looked for by its name before it is asked for again.
KEY_KEPT = timedelta(hours=23)
CHECK_SOON, CHECK_LATER = timedelta(minutes=1), timedelta(hours=6)
SWEEP_BATCH = 50


# ----------------------------------------------------------------------------------------------- the seller's account


def open_seller_account(actor: Actor, now: datetime) -> str:
    """The page on which a person tells the provider who is paid; it is good once and for minutes."""
    demand(actor, Action.PAY)
    with transaction.atomic():
        row, new = SellerAccount.objects.get_or_create(
            organisation=actor.organisation,
            defaults={"created_by": actor.name, "created_at": now, "checked_at": now},
        )
        if new:
            record(actor.organisation, actor.name, "seller_account.created", str(actor.organisation.pk))
    ours = str(actor.organisation.pk)
    payee = gateway.open_payee(ours) if row.account_id is None else gateway.fetch_payee(row.account_id)
    _note_payee(actor.organisation, payee, now)
    page = f"{settings.PUBLIC_URL}{reverse('billing:payouts')}"
    return gateway.onboarding_url(payee.id, back_url=f"{page}?back=1", again_url=f"{page}?again=1")


def refresh_seller_account(organisation: Organisation, now: datetime) -> SellerAccount | None:
    """Ask the provider how the account stands; None where there is none."""
    row = SellerAccount.objects.filter(organisation=organisation).first()
    if row is None or row.account_id is None:
        return row
    _note_payee(organisation, gateway.fetch_payee(row.account_id), now)
    row.refresh_from_db()
    return row


@transaction.atomic
def _note_payee(organisation: Organisation, payee: gateway.Payee, now: datetime) -> None:
    row = SellerAccount.objects.select_for_update(no_key=True).get(organisation=organisation)
    if payee.payouts_enabled != row.payouts_enabled:
        word = "enabled" if payee.payouts_enabled else "disabled"
        record(organisation, SYSTEM, f"seller_account.{word}", payee.id, needs=list(payee.needs))
    row.account_id = payee.id
    row.details_submitted, row.payouts_enabled = payee.details_submitted, payee.payouts_enabled
    row.needs, row.checked_at = list(payee.needs), now
    row.save(update_fields=["account_id", "details_submitted", "payouts_enabled", "needs", "checked_at"])


# ------------------------------------------------------------------------------------------------------------ payouts


def request_payout(actor: Actor, now: datetime) -> Payout:
    """All that is payable, at the seller's wish; sent at once, or by the sweep while the provider does not answer."""
    demand(actor, Action.PAY)
    return send_or_leave(start_payout(actor.organisation, by=actor.name, now=now).pk, now)


def send_or_leave(key: str, now: datetime) -> Payout:
    """Send it; while the provider does not answer, it is the sweep's."""
    try:
        return send_payout(key, now)
    except Busy:
        return Payout.objects.get(pk=key)


def start_payout(organisation: Organisation, *, by: str, now: datetime) -> Payout:
    """Pend all that is payable, in whole cents; the rest stays."""
    why = why_not(organisation, now)
    if why:
        raise Conflict(why, code="no_payout")
    payable = account(AccountKind.SELLER_PAYABLE, organisation)
    amount_uusd = floor_to_cents_uusd(payable.available_uusd)
    payout = Payout(organisation=organisation, amount_uusd=amount_uusd, created_by=by, created_at=now, checked_at=now)
    available = account(AccountKind.STRIPE_AVAILABLE)
    try:
        with transaction.atomic():
            payout.save(force_insert=True)
            name = fact_id("payout", payout.pk)
            post([Entry(name, TransferKind.PAYOUT, payable, available, amount_uusd, payout.pk, Phase.PENDING)])
            record(organisation, by, "payout.created", payout.pk, amount_uusd=amount_uusd)
    except InsufficientFunds as error:
        raise Conflict(
            "what buyers paid in is still on its way to us: it can be paid out in a few days", code="not_available_yet"
        ) from error
    except IntegrityError as error:
        raise Conflict("a payout is on its way already", code="no_payout") from error
    return payout


def why_not(organisation: Organisation, now: datetime) -> str:
    """Why nothing can be paid out now, in words; empty where it can."""
    row = SellerAccount.objects.filter(organisation=organisation).first()
    if row is None or not row.payouts_enabled:
        return "the payment provider does not know yet where to pay you"
    if is_frozen(organisation):
        return "payments of this organisation are under dispute"
    if Payout.objects.filter(organisation=organisation, state=PayoutState.CREATED).exists():
        return "a payout is on its way already"
    first = Meter.objects.filter(seller=organisation, charged_uusd__gt=0).order_by("start_at").first()
    wait = timedelta(days=settings.FIRST_PAYOUT_DAYS)
    if first is not None and first.start_at > now - wait:
        return f"the first payout is made {settings.FIRST_PAYOUT_DAYS} days after the first sale"
    payable = LedgerAccount.objects.filter(kind=AccountKind.SELLER_PAYABLE, organisation=organisation).first()
    have_uusd = 0 if payable is None else payable.available_uusd
    if have_uusd < settings.PAYOUT_LEAST_UUSD:
        return f"{format_usd(have_uusd)} is payable, and {format_usd(settings.PAYOUT_LEAST_UUSD)} is the least"
    return ""


def send_payout(key: str, now: datetime) -> Payout:
    """Ask for the transfer and follow the answer. Raises Busy while there is none; the sweep asks again."""
    payout = Payout.objects.select_related("organisation__seller_account").get(pk=key)
    if payout.state != PayoutState.CREATED:
        return payout
    try:
        sent = gateway.find_transfer(key) if now - payout.created_at > KEY_KEPT else None
        if sent is None:
            account_id = payout.organisation.seller_account.account_id
            sent = gateway.send_transfer(key, account_id or "", payout.amount_uusd)
    except Conflict as refused:
        if refused.code != gateway.REFUSED:
            raise
        return _refused(key, refused.message, now)
    return _sent(key, sent, now)


def follow_transfer(transfer_id: str, now: datetime) -> Payout | None:
    """What the provider says of a transfer of ours; None for one that is not."""
    sent = gateway.fetch_transfer(transfer_id)
    payout = Payout.objects.filter(pk=sent.ref).first()
    if payout is None:
        return None
    payout = _sent(payout.pk, sent, now) if payout.state == PayoutState.CREATED else payout
    return _taken_back(payout.pk, sent, now) if sent.reversed_uusd > payout.reversed_uusd else payout


def sweep_payouts(now: datetime) -> int:
    """Send what was interrupted, and pay the sellers whose week is over; returns how many were touched."""
    touched = 0
    for payout in Payout.objects.filter(state=PayoutState.CREATED, checked_at__lte=now - CHECK_SOON)[:SWEEP_BATCH]:
        if Payout.objects.filter(pk=payout.pk, checked_at=payout.checked_at).update(checked_at=now):
            touched += _try_to_send(payout.pk, now)
    for row in _sellers_due(now):
        if why_not(row.organisation, now):
            continue
        try:
            payout = start_payout(row.organisation, by=SYSTEM, now=now)
        except Conflict as refused:
            logger.info("%s is not paid out now: %s", row.organisation, refused.message)
            continue
        touched += _try_to_send(payout.pk, now)
    return touched


def _sellers_due(now: datetime) -> list[SellerAccount]:
    """Sellers with enough that is payable, who were paid nothing for a week."""
    enough = LedgerAccount.objects.filter(
        kind=AccountKind.SELLER_PAYABLE, credits_posted_uusd__gte=settings.PAYOUT_LEAST_UUSD
    ).values("organisation")
    lately = Payout.objects.filter(created_at__gt=now - WEEK).values("organisation")
    rows = SellerAccount.objects.filter(payouts_enabled=True, organisation__in=enough)
    return list(rows.exclude(organisation__in=lately).select_related("organisation").order_by("pk")[:SWEEP_BATCH])


def _try_to_send(key: str, now: datetime) -> bool:
    try:
        send_payout(key, now)
    except Problem as problem:
        logger.warning("payout %s is tried again: %s", key, problem.message)
        return False
    return True


@transaction.atomic
def _sent(key: str, sent: gateway.Sent, now: datetime) -> Payout:
    payout = Payout.objects.select_for_update(no_key=True).select_related("organisation").get(pk=key)
    if payout.state == PayoutState.CREATED:
        if (sent.ref, sent.amount_uusd) != (key, payout.amount_uusd):
            raise Conflict(f"{sent.id} is no transfer of {key}", code="changed_replay")
        _resolve(payout, Phase.CONFIRM)
        rows = Payout.objects.filter(pk=key)
        PAYOUT_MACHINE.advance(rows, PayoutState.PAID, transfer_id=sent.id, settled_at=now, checked_at=now)
        record(payout.organisation, SYSTEM, "payout.paid", key, transfer=sent.id)
        payout.refresh_from_db()
    return payout


@transaction.atomic
def _refused(key: str, why: str, now: datetime) -> Payout:
    payout = Payout.objects.select_for_update(no_key=True).select_related("organisation").get(pk=key)
    if payout.state == PayoutState.CREATED:
        _resolve(payout, Phase.VOID)
        rows = Payout.objects.filter(pk=key)
        PAYOUT_MACHINE.advance(rows, PayoutState.FAILED, problem=why[:200], settled_at=now, checked_at=now)
        record(payout.organisation, SYSTEM, "payout.failed", key, why=why)
        payout.refresh_from_db()
    return payout


def _resolve(payout: Payout, phase: Phase) -> None:
    payable = account(AccountKind.SELLER_PAYABLE, payout.organisation)
    available = account(AccountKind.STRIPE_AVAILABLE)
    post(
        [
            Entry(
                fact_id("payout", payout.pk, phase),
                TransferKind.PAYOUT,
                payable,
                available,
                payout.amount_uusd,
                payout.pk,
                phase,
                fact_id("payout", payout.pk),
            )
        ]
    )


@transaction.atomic
def _taken_back(key: str, sent: gateway.Sent, now: datetime) -> Payout:
    """What came back of a payout pays first what the seller owes, and is payable again for the rest."""
    payout = Payout.objects.select_for_update(no_key=True).select_related("organisation").get(pk=key)
    more_uusd = sent.reversed_uusd - payout.reversed_uusd
    if payout.state == PayoutState.CREATED or more_uusd <= 0:
        return payout
    available = account(AccountKind.STRIPE_AVAILABLE)
    owed = account(AccountKind.SELLER_RECEIVABLE, payout.organisation)
    payable = account(AccountKind.SELLER_PAYABLE, payout.organisation)
    to_owed_uusd = min(more_uusd, max(0, owed.available_uusd))
    parts = ((owed, to_owed_uusd, "owed"), (payable, more_uusd - to_owed_uusd, "payable"))
    post(
        [
            Entry(
                fact_id("payout-reversal", key, sent.reversed_uusd, name),
                TransferKind.PAYOUT_REVERSAL,
                available,
                target,
                amount_uusd,
                key,
            )
            for target, amount_uusd, name in parts
            if amount_uusd
        ]
    )
    rows = Payout.objects.filter(pk=key)
    rows.update(reversed_uusd=sent.reversed_uusd)
    if sent.reversed_uusd == payout.amount_uusd:
        PAYOUT_MACHINE.try_advance(rows, PayoutState.REVERSED)
    record(payout.organisation, SYSTEM, "payout.reversed", key, amount_uusd=more_uusd)
    payout.refresh_from_db()
    return payout
