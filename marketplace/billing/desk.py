"""What only operators see of the money: what waits and since when, what all accounts of a kind hold together, and which
transfers something refers to.

Invariant: reads only. What waits longer than it should is said to be late, by a limit that stands beside it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Count, Min, Q, QuerySet, Sum

from marketplace.billing.models import (
    NORMAL,
    AccountKind,
    CardRefund,
    CardRefundState,
    Correction,
    DisputeState,
    Freeze,
    LedgerAccount,
    Meter,
    MeterState,
    Normal,
    PaymentDispute,
    Payout,
    PayoutState,
    StripeEvent,
    TopUp,
    TopUpState,
    Transfer,
)

# What everybody could ask of us, and what we could pay it with.
WE_HAVE = (AccountKind.STRIPE_PENDING, AccountKind.STRIPE_AVAILABLE, AccountKind.BANK)
WE_OWE = (
    AccountKind.BUYER_CASH,
    AccountKind.BUYER_PROMO,
    AccountKind.ESCROW,
    AccountKind.SELLER_ACCRUED,
    AccountKind.SELLER_PAYABLE,
    AccountKind.SELLER_RESERVE,
)
TRANSFERS_SHOWN = 100


@dataclass(frozen=True)
class Waiting:
    """Something on its way: how many, how much (None: it is no money), since when, and how long is normal."""

    words: str
    count: int
    amount_uusd: int | None
    oldest_at: datetime | None
    normal: timedelta | None

    def late(self, now: datetime) -> bool:
        return self.oldest_at is not None and self.normal is not None and now - self.oldest_at > self.normal


@dataclass(frozen=True)
class Total:
    kind: AccountKind
    accounts: int
    balance_uusd: int

    @property
    def grows_by_debits(self) -> bool:
        return NORMAL[self.kind] == Normal.DEBIT


def totals() -> list[Total]:
    """Every kind of account that was ever used, in the chart's order."""
    rows = LedgerAccount.objects.values_list("kind").annotate(
        count=Count("pk"), out=Sum("debits_posted_uusd"), into=Sum("credits_posted_uusd")
    )
    found = {kind: (count, int(debits), int(credits)) for kind, count, debits, credits in rows}
    return [
        Total(kind, count, debits - credits if NORMAL[kind] == Normal.DEBIT else credits - debits)
        for kind in AccountKind
        if kind in found
        for count, debits, credits in [found[kind]]
    ]


def sum_of(kinds: Iterable[AccountKind], of: Iterable[Total]) -> int:
    wanted = set(kinds)
    return sum(total.balance_uusd for total in of if total.kind in wanted)


def waiting(now: datetime) -> list[Waiting]:
    """What clears with time, or with somebody's help; nothing that is empty."""
    money = {total.kind: total for total in totals()}
    since = _since_empty([AccountKind.BUYER_RECEIVABLE, AccountKind.SELLER_RECEIVABLE, AccountKind.SELLER_PAYABLE])

    def owed(kind: AccountKind, words: str, normal: timedelta | None) -> Waiting:
        count, oldest = since.get(kind, (0, None))
        return Waiting(words, count, money[kind].balance_uusd if kind in money else 0, oldest, normal)

    paid = TopUp.objects.filter(state=TopUpState.PAID, available_at=None)
    found = [
        _rows("Paid in, not yet available to us", paid, "settled_at", timedelta(days=10)),
        _rows(
            "Payouts on their way", Payout.objects.filter(state=PayoutState.CREATED), "created_at", timedelta(hours=1)
        ),
        _rows(
            "Refunds to cards on their way",
            CardRefund.objects.filter(state=CardRefundState.CREATED),
            "created_at",
            timedelta(hours=1),
        ),
        owed(AccountKind.SELLER_PAYABLE, "Payable to sellers", timedelta(days=14)),
        owed(AccountKind.BUYER_RECEIVABLE, "Owed by buyers", timedelta(days=3)),
        owed(AccountKind.SELLER_RECEIVABLE, "Owed by sellers", timedelta(days=3)),
        _rows("Disputes that are open", PaymentDispute.objects.filter(state=DisputeState.OPEN), "opened_at", None),
        _unpriced("Organisations that are frozen", Freeze.objects.filter(until=None), "since", None),
        _unpriced(
            "The provider's messages not acted on",
            StripeEvent.objects.filter(processed_at=None),
            "received_at",
            timedelta(minutes=10),
        ),
        _unpriced(
            "Meters open after their window",
            Meter.objects.filter(state=MeterState.OPEN, end_at__lt=now),
            "end_at",
            timedelta(minutes=15),
        ),
    ]
    return [each for each in found if each.count]


def corrections() -> QuerySet[Correction]:
    """Those that wait first, then the newest."""
    return Correction.objects.select_related(
        "original__debit__organisation", "original__credit__organisation"
    ).order_by("-asked_at", "-pk")


def transfers_of(ref: str) -> QuerySet[Transfer]:
    """What refers to something, or the one transfer of that id: newest first."""
    wanted = Q(ref=ref)
    with suppress(ValueError):  # no id of a transfer: it is what one refers to
        wanted |= Q(pk=uuid.UUID(ref))
    rows = Transfer.objects.filter(wanted).select_related("debit__organisation", "credit__organisation")
    return rows.order_by("-created_at", "-pk")[:TRANSFERS_SHOWN]


def _rows(words: str, rows: QuerySet, since: str, normal: timedelta | None) -> Waiting:
    seen = rows.aggregate(count=Count("pk"), total=Sum("amount_uusd"), oldest=Min(since))
    return Waiting(words, seen["count"], int(seen["total"] or 0), seen["oldest"], normal)


def _unpriced(words: str, rows: QuerySet, since: str, normal: timedelta | None) -> Waiting:
    seen = rows.aggregate(count=Count("pk"), oldest=Min(since))
    return Waiting(words, seen["count"], None, seen["oldest"], normal)


def _since_empty(kinds: list[AccountKind]) -> dict[str, tuple[int, datetime | None]]:
    """Of each kind: how many accounts hold something, and when the first of them last began to."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH held AS (
                SELECT id, kind, normal FROM billing_ledgeraccount
                 WHERE kind = ANY(%s) AND debits_posted_uusd <> credits_posted_uusd),
            moves AS (
                SELECT h.id, t.created_at, t.id AS transfer,
                       CASE WHEN (t.debit_id = h.id) = (h.normal = 'D') THEN amount_uusd ELSE -amount_uusd END AS moved
                  FROM held h JOIN billing_transfer t ON h.id IN (t.debit_id, t.credit_id)
                 WHERE t.phase IN ('S', 'C')),
            run AS (
                SELECT id, created_at, transfer,
                       sum(moved) OVER (PARTITION BY id ORDER BY created_at, transfer) AS balance FROM moves),
            begun AS (
                SELECT id, min(created_at) FILTER (WHERE created_at > emptied) AS at
                  FROM (SELECT id, created_at, coalesce(max(created_at) FILTER (WHERE balance = 0)
                                                        OVER (PARTITION BY id), '-infinity') AS emptied FROM run) r
                 GROUP BY id)
            SELECT h.kind, count(*), min(b.at) FROM held h LEFT JOIN begun b USING (id) GROUP BY h.kind
            """,
            [[str(kind) for kind in kinds]],
        )
        return {kind: (count, at) for kind, count, at in cursor.fetchall()}
