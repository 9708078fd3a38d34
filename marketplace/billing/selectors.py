"""Reading the ledger for people.

Invariant: a statement adds up by construction that anyone can repeat: opening + its lines = closing, per account.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import F, Q, QuerySet, Sum

from marketplace.accounts.models import Organisation
from marketplace.billing.models import LedgerAccount, Normal, Phase, Transfer


@dataclass(frozen=True)
class Line:
    at: datetime
    what: str
    ref: str
    amount_uusd: int  # negative: it left the account


@dataclass(frozen=True)
class AccountStatement:
    account: LedgerAccount
    opening_uusd: int
    lines: tuple[Line, ...]
    closing_uusd: int  # summed apart from the lines, so that a reader's own sum is a check


def statement(organisation: Organisation, since: datetime, until: datetime) -> list[AccountStatement]:
    """What moved on each of the organisation's accounts in [since, until), by the time of posting."""
    posted = Transfer.objects.filter(phase__in=[Phase.SINGLE, Phase.CONFIRM])
    accounts = LedgerAccount.objects.filter(organisation=organisation).order_by("pk")
    opening = _sums(posted.filter(created_at__lt=since), organisation)
    closing = _sums(posted.filter(created_at__lt=until), organisation)
    lines: dict[int, list[Line]] = {}
    grows_by_debit = {row.pk: row.normal == Normal.DEBIT for row in accounts}
    moved = posted.filter(created_at__gte=since, created_at__lt=until)
    mine = Q(debit__organisation=organisation) | Q(credit__organisation=organisation)
    for transfer in moved.filter(mine).order_by("created_at", "pk"):
        for account_id, by_debit in ((transfer.debit_id, True), (transfer.credit_id, False)):
            if account_id in grows_by_debit:
                sign = 1 if grows_by_debit[account_id] == by_debit else -1
                line = Line(transfer.created_at, transfer.get_kind_display(), transfer.ref, sign * transfer.amount_uusd)
                lines.setdefault(account_id, []).append(line)
    return [
        AccountStatement(row, opening.get(row.pk, 0), tuple(lines.get(row.pk, ())), closing.get(row.pk, 0))
        for row in accounts
    ]


def _sums(transfers: QuerySet[Transfer], organisation: Organisation) -> dict[int, int]:
    """Balance by account, on the side on which it grows."""
    sums: dict[int, int] = {}
    for side, grows in (("debit", Normal.DEBIT), ("credit", Normal.CREDIT)):
        rows = (
            transfers.filter(**{f"{side}__organisation": organisation})
            .order_by()
            .values_list(f"{side}_id", f"{side}__normal")
            .annotate(total=Sum(F("amount_uusd")))
        )
        for account_id, normal, total in rows:
            sums[account_id] = sums.get(account_id, 0) + (int(total) if normal == grows else -int(total))
    return sums
