"""Reading the ledger for people: four balances, and a statement of what moved them, by day.

Invariant: a statement adds up by construction that anyone can repeat: opening + its lines = closing, per balance. The
closing is summed apart from the lines, so that a reader's own sum is a check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import date, datetime

from django.db import connection
from django.db.models import Count, F, Max, Min, Q, QuerySet, Sum
from django.db.models.functions import TruncDate

from marketplace.accounts.models import Organisation
from marketplace.billing.models import (
    AccountKind,
    CardRefund,
    LedgerAccount,
    Normal,
    Payout,
    PayoutState,
    Phase,
    SellerAccount,
    TopUp,
    Transfer,
    TransferKind,
)
from marketplace.core.errors import NotFound

Period = tuple[datetime, datetime]

# An organisation has many escrows; to a person they are one balance.
BALANCE_OF: dict[str, str] = {
    AccountKind.BUYER_CASH: "cash_uusd",
    AccountKind.ESCROW: "held_uusd",
    AccountKind.SELLER_ACCRUED: "earned_uusd",
    AccountKind.SELLER_PAYABLE: "payable_uusd",
    AccountKind.SELLER_RESERVE: "reserve_uusd",
}
# One side's view of a transfer, where it differs from the transfer's own name.
WORDS_PAYING: dict[int, str] = {TransferKind.CAPTURE: "Usage", TransferKind.FEE: "Usage"}
WORDS_RECEIVING: dict[int, str] = {
    TransferKind.CAPTURE: "Earned",
    TransferKind.DEPOSIT: "Top-up",
    TransferKind.MATURE: "Became payable",
    TransferKind.SELLER_REFUND: "Refund",
}
# Lines of the seller's side: what they refer to is the buyer's.
OF_SALES = frozenset({"Earned", "Became payable", "Kept in reserve", TransferKind.SELLER_REFUND.label})

# What would be billed, were everything charged that is known: the min rule, in SQL. m is the meter.
BILLABLE = """
    greatest(m.billable_gpu_ms, least(
        (SELECT coalesce(sum(c.gpu_ms_total), 0)::bigint FROM billing_metercounter c WHERE c.meter_id = m.id),
        m.covered_gpu_ms,
        m.gpus * (floor(extract(epoch FROM m.end_at) * 1000) - floor(extract(epoch FROM m.start_at) * 1000))::bigint))
"""

METERED = f"""
    SELECT coalesce(sum(CASE WHEN m.state = 'closed' THEN m.charged_uusd
                             ELSE div(m.rate_uusd_per_gpu_hour::numeric * {BILLABLE}, 3600000) END), 0)::bigint
      FROM billing_meter m WHERE m.id = ANY(%s)
"""  # noqa: S608 - of constants alone


@dataclass
class Balances:
    cash_uusd: int = 0  # spendable
    held_uusd: int = 0  # in escrow for jobs and leases
    earned_uusd: int = 0  # by our islands, still in the dispute window
    payable_uusd: int = 0  # to us, at the next payout
    reserve_uusd: int = 0  # of our first sales, kept for a while

    def add(self, name: str, amount_uusd: int) -> None:
        setattr(self, name, getattr(self, name) + amount_uusd)

    def items(self) -> list[tuple[str, int]]:
        return [(each.name, getattr(self, each.name)) for each in fields(self)]


@dataclass
class Line:
    """What one thing did to the balances on one day."""

    day: date
    first_at: datetime
    last_at: datetime
    what: str
    ref: str
    entries: int = 0  # transfers it stands for
    moved: Balances = field(default_factory=Balances)
    fee_uusd: int | None = None  # for what was earned: our part, already taken off


@dataclass(frozen=True)
class Statement:
    since: datetime
    until: datetime
    opening: Balances
    lines: tuple[Line, ...]
    closing: Balances


def balances(organisation: Organisation) -> Balances:
    found = Balances()
    for account in LedgerAccount.objects.filter(organisation=organisation, kind__in=BALANCE_OF):
        found.add(BALANCE_OF[account.kind], account.balance_uusd)
    return found


def held_for(organisation: Organisation) -> list[tuple[str, int]]:
    """What is held, by what it is held for, the most first; together it is the held balance."""
    escrows = LedgerAccount.objects.filter(organisation=organisation, kind=AccountKind.ESCROW)
    held = escrows.filter(credits_posted_uusd__gt=F("debits_posted_uusd"))
    return sorted(((each.ref, each.balance_uusd) for each in held), key=lambda pair: (-pair[1], pair[0]))


def metered_uusd(refs: Iterable[str]) -> int:
    """The charge for what is known to be delivered on these meters, charged already or with the next tick."""
    with connection.cursor() as cursor:
        cursor.execute(METERED, [list(refs)])
        return int(cursor.fetchone()[0])


def statement(organisation: Organisation, since: datetime, until: datetime) -> Statement:
    """What moved in [since, until), by the time of posting."""
    posted = Transfer.objects.filter(phase__in=[Phase.SINGLE, Phase.CONFIRM])
    return Statement(
        since=since,
        until=until,
        opening=_sums(posted.filter(created_at__lt=since), organisation),
        lines=tuple(_lines(posted.filter(created_at__gte=since, created_at__lt=until), organisation)),
        closing=_sums(posted.filter(created_at__lt=until), organisation),
    )


def top_ups_of(organisation: Organisation) -> QuerySet[TopUp]:
    return TopUp.objects.filter(organisation=organisation).order_by("-created_at", "-pk")


def top_up_for(organisation: Organisation, top_up_id: str) -> TopUp:
    found = top_ups_of(organisation).filter(pk=top_up_id).first()
    if found is None:
        raise NotFound("there is no such top-up")
    return found


def payouts_of(organisation: Organisation) -> QuerySet[Payout]:
    return Payout.objects.filter(organisation=organisation).order_by("-created_at", "-pk")


def paid_out_uusd(organisation: Organisation) -> int:
    """In all, less what was taken back."""
    paid = payouts_of(organisation).filter(state__in=[PayoutState.PAID, PayoutState.REVERSED]).order_by()
    return int(paid.aggregate(total=Sum(F("amount_uusd") - F("reversed_uusd")))["total"] or 0)


def seller_account_of(organisation: Organisation) -> SellerAccount | None:
    return SellerAccount.objects.filter(organisation=organisation).first()


def card_refunds_of(organisation: Organisation) -> QuerySet[CardRefund]:
    return CardRefund.objects.filter(organisation=organisation).order_by("-created_at", "-pk")


def _lines(moved: QuerySet[Transfer], organisation: Organisation) -> list[Line]:
    """Grouped by the database: a lease is captured from every few seconds, and nobody reads that."""
    mine = Q(debit__organisation=organisation) | Q(credit__organisation=organisation)
    groups = (
        moved.filter(mine)
        .order_by()
        .annotate(day=TruncDate("created_at"))
        .values_list("day", "kind", "ref", "debit__kind", "debit__organisation", "credit__kind", "credit__organisation")
        .annotate(total=Sum("amount_uusd"), entries=Count("pk"), first=Min("created_at"), last=Max("created_at"))
    )
    lines: dict[tuple[date, str, str], Line] = {}
    for day, kind, ref, debit, payer, credit, payee, total, entries, first, last in groups:
        touched: list[Line] = []
        for words, account, owner, sign in ((WORDS_PAYING, debit, payer, -1), (WORDS_RECEIVING, credit, payee, 1)):
            if owner != organisation.pk or account not in BALANCE_OF:
                continue
            what = words.get(kind) or TransferKind(kind).label
            line = lines.setdefault((day, what, ref), Line(day, first, last, what, ref))
            line.first_at, line.last_at = min(line.first_at, first), max(line.last_at, last)
            line.moved.add(BALANCE_OF[account], sign * int(total))
            if not any(line is each for each in touched):
                line.entries += entries
                touched.append(line)
    # From one hold to another of the same organisation nothing moves that a person could see.
    seen = [line for line in lines.values() if any(amount for _, amount in line.moved.items())]
    _note_fees(moved, [line for line in seen if line.what == WORDS_RECEIVING[TransferKind.CAPTURE]])
    return sorted(seen, key=lambda line: (line.day, line.first_at, line.what, line.ref))


def _note_fees(moved: QuerySet[Transfer], earned: list[Line]) -> None:
    """Beside what a seller earned, what we took off: posted with it, under the same reference."""
    fees = (
        moved.filter(kind=TransferKind.FEE, ref__in={line.ref for line in earned})
        .order_by()
        .annotate(day=TruncDate("created_at"))
        .values_list("day", "ref")
        .annotate(total=Sum("amount_uusd"))
    )
    of = {(day, ref): int(total) for day, ref, total in fees}
    for line in earned:
        line.fee_uusd = of.get((line.day, line.ref), 0)


def _sums(transfers: QuerySet[Transfer], organisation: Organisation) -> Balances:
    found = Balances()
    for side, grows in (("debit", Normal.DEBIT), ("credit", Normal.CREDIT)):
        rows = (
            transfers.filter(**{f"{side}__organisation": organisation, f"{side}__kind__in": list(BALANCE_OF)})
            .order_by()
            .values_list(f"{side}__kind", f"{side}__normal")
            .annotate(total=Sum(F("amount_uusd")))
        )
        for kind, normal, total in rows:
            found.add(BALANCE_OF[kind], int(total) if normal == grows else -int(total))
    return found
