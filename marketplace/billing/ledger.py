"""The one caller of `ledger_post` and of `ledger_post_set`, the database functions that write the ledger.

Invariant: a batch is posted whole or not at all, and once: the same id with the same content is no second transfer,
with other content an error. One batch a transaction, or the accounts locked first (`lock`), and no deadlock can arise.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import IntegrityError, connection, transaction

from marketplace.accounts.models import Organisation
from marketplace.billing.models import NORMAL, WITHOUT_FLOOR, AccountKind, LedgerAccount, Phase, TransferKind
from marketplace.core.errors import Conflict, InsufficientFunds, InvalidInput
from marketplace.core.money import MAX_AMOUNT_UUSD


@dataclass(frozen=True)
class Entry:
    """One transfer. `id` is of the fact it records (`fact_id`), `pending` the transfer that C or V resolves."""

    id: uuid.UUID
    kind: TransferKind
    debit: LedgerAccount
    credit: LedgerAccount
    amount_uusd: int
    ref: str = ""
    phase: Phase = Phase.SINGLE
    pending: uuid.UUID | None = None
    effective_at: datetime | None = None  # None: when it is posted


def account(kind: AccountKind, organisation: Organisation | None = None, ref: str = "") -> LedgerAccount:
    """The account of that purpose, opened at zero when it is first asked for."""
    floor_uusd = None if kind in WITHOUT_FLOOR else 0
    row, _ = LedgerAccount.objects.get_or_create(
        kind=kind,
        organisation=organisation,
        ref=ref,
        currency="USD",
        defaults={"normal": NORMAL[kind], "floor_uusd": floor_uusd},
    )
    return row


def lock(*accounts: LedgerAccount) -> list[LedgerAccount]:
    """The accounts as they are now, held until the transaction ends, in the order in which they were named."""
    ids = {row.pk for row in accounts}
    rows = LedgerAccount.objects.filter(pk__in=ids).order_by("pk").select_for_update(no_key=True)
    locked = {row.pk: row for row in rows}
    return [locked[row.pk] for row in accounts]


def balance_uusd(of: LedgerAccount) -> int:
    """Posted, read anew."""
    return LedgerAccount.objects.get(pk=of.pk).balance_uusd


def post(entries: Sequence[Entry]) -> int:
    """Post all of `entries`, or none; returns how many were new."""
    return _post("ledger_post", entries)


def post_set(entries: Sequence[Entry]) -> int:
    """The same for many entries that are posted at once, each id in it once: set by set, and not one by one."""
    if any(entry.phase != Phase.SINGLE for entry in entries):
        raise ValueError("what is pending is posted one by one")
    return _post("ledger_post_set", entries)


def _post(function: str, entries: Sequence[Entry]) -> int:
    if not entries:
        return 0
    if any(not 0 < entry.amount_uusd <= MAX_AMOUNT_UUSD for entry in entries):
        raise InvalidInput.at("amount_uusd", "must be more than nothing and not too large")
    journal_id = str(entries[0].id)
    batch = [
        {
            "id": str(entry.id),
            "kind": int(entry.kind),
            "phase": str(entry.phase),
            "debit": entry.debit.pk,
            "credit": entry.credit.pk,
            "amount_uusd": entry.amount_uusd,
            "pending": str(entry.pending) if entry.pending else None,
            "journal_id": journal_id,
            "ref": entry.ref,
            "effective_at": entry.effective_at.isoformat() if entry.effective_at else None,
        }
        for entry in entries
    ]
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SELECT {function}(%s::jsonb)", [json.dumps(batch)])
            return int(cursor.fetchone()[0])
    except IntegrityError as error:
        constraint = getattr(getattr(error.__cause__, "diag", None), "constraint_name", None)
        if constraint == "ledger_account_floor":
            raise InsufficientFunds("there is not enough money on the account") from error
        if constraint in ("ledger_changed_replay", "billing_transfer_pkey"):
            raise Conflict("this was already posted with other content", code="changed_replay") from error
        if constraint == "billing_transfer_pending_id_key":
            raise Conflict("the pending transfer is already resolved", code="already_resolved") from error
        raise
