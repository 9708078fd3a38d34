"""Disputed payments: the bank takes the money at once, and gives it back if the dispute is won.

Invariant: a dispute takes its money once, from the buyer's cash first and as their debt for the rest; won, it returns
to where it was taken from. While one stands, and while a debt of it is left, the organisation is frozen.
"""

from __future__ import annotations

import logging
from datetime import datetime

from django.db import transaction

from marketplace.accounts.audit import record
from marketplace.billing import gateway
from marketplace.billing.ledger import Entry, account, lock, post
from marketplace.billing.models import (
    DISPUTE_MACHINE,
    AccountKind,
    DisputeState,
    LedgerAccount,
    PaymentDispute,
    TopUp,
    Transfer,
    TransferKind,
)
from marketplace.billing.services.freezing import freeze, thaw
from marketplace.core.ids import fact_id

logger = logging.getLogger(__name__)

SYSTEM = "system:disputes"


def follow_dispute(dispute_id: str, now: datetime) -> PaymentDispute | None:
    """Ask the provider how the dispute stands and follow it; None for one that is of no payment of ours."""
    found = gateway.fetch_dispute(dispute_id)
    top_up = TopUp.objects.select_related("organisation").filter(payment_ref=found.payment_ref).first()
    if top_up is None or found.state == "warning":
        return None
    row = _open(top_up, found, now)
    if found.state == "won":
        return _won(row.pk, now)
    if found.state == "lost":
        return _lost(row.pk, now)
    return row


@transaction.atomic
def _open(top_up: TopUp, found: gateway.Disputed, now: datetime) -> PaymentDispute:
    organisation = top_up.organisation
    cash, available = account(AccountKind.BUYER_CASH, organisation), account(AccountKind.STRIPE_AVAILABLE)
    cash, available = lock(cash, available)
    known = PaymentDispute.objects.filter(pk=found.id).first()
    if known is not None:
        return known
    from_cash_uusd = min(found.amount_uusd, max(0, cash.available_uusd))
    row = PaymentDispute.objects.create(
        id=found.id,
        top_up=top_up,
        organisation=organisation,
        amount_uusd=found.amount_uusd,
        from_cash_uusd=from_cash_uusd,
        owed_uusd=found.amount_uusd - from_cash_uusd,
        opened_at=now,
    )
    _take(row, cash, available)
    freeze(organisation, reason="a payment is disputed", ref=found.id, by=SYSTEM, now=now)
    record(organisation, SYSTEM, "top_up.disputed", top_up.pk, dispute=found.id, amount_uusd=found.amount_uusd)
    return row


@transaction.atomic
def _won(dispute_id: str, now: datetime) -> PaymentDispute:
    row = PaymentDispute.objects.select_related("organisation", "top_up").get(pk=dispute_id)
    if DISPUTE_MACHINE.try_advance(PaymentDispute.objects.filter(pk=dispute_id), DisputeState.WON, closed_at=now):
        _give_back(row)
        thaw(row.organisation, ref=dispute_id, by=SYSTEM, now=now)
        record(row.organisation, SYSTEM, "top_up.dispute_won", row.top_up_id, dispute=dispute_id)
    row.refresh_from_db()
    return row


@transaction.atomic
def _lost(dispute_id: str, now: datetime) -> PaymentDispute:
    row = PaymentDispute.objects.select_related("organisation", "top_up").get(pk=dispute_id)
    if DISPUTE_MACHINE.try_advance(PaymentDispute.objects.filter(pk=dispute_id), DisputeState.LOST, closed_at=now):
        record(row.organisation, SYSTEM, "top_up.dispute_lost", row.top_up_id, dispute=dispute_id)
    owed = LedgerAccount.objects.filter(kind=AccountKind.BUYER_RECEIVABLE, organisation=row.organisation).first()
    if owed is None or owed.balance_uusd == 0:
        thaw(row.organisation, ref=dispute_id, by=SYSTEM, now=now)
    row.refresh_from_db()
    return row


def _take(row: PaymentDispute, cash: LedgerAccount, available: LedgerAccount) -> None:
    """Out of the buyer's cash and debt, into the hole it made at the provider: in what is available there first."""
    owed = account(AccountKind.BUYER_RECEIVABLE, row.organisation)
    from_available_uusd = min(row.amount_uusd, max(0, available.available_uusd))
    holes = [
        ("available", available, from_available_uusd),
        ("pending", account(AccountKind.STRIPE_PENDING), row.amount_uusd - from_available_uusd),
    ]
    entries = []
    for source, theirs, left_uusd in (("cash", cash, row.from_cash_uusd), ("owed", owed, row.owed_uusd)):
        for number, (place, ours, room_uusd) in enumerate(holes):
            part_uusd = min(left_uusd, room_uusd)
            if part_uusd:
                name = fact_id("dispute", row.pk, source, place)
                entries.append(Entry(name, TransferKind.CHARGEBACK, theirs, ours, part_uusd, row.pk[:80]))
                left_uusd -= part_uusd
                holes[number] = (place, ours, room_uusd - part_uusd)
    post(entries)


def _give_back(row: PaymentDispute) -> None:
    taken = Transfer.objects.filter(ref=row.pk[:80], kind=TransferKind.CHARGEBACK).select_related("debit", "credit")
    post(
        [
            Entry(
                fact_id("dispute-won", each.pk),
                TransferKind.CHARGEBACK_WON,
                each.credit,
                each.debit,
                each.amount_uusd,
                each.ref,
            )
            for each in taken.order_by("pk")
        ]
    )
