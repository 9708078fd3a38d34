"""The one caller of `ledger_told`, the database function through which the ledger is written.

Invariant: a batch is posted whole or not at all, and once: the same id with the same content is no second transfer,
with other content an error. One batch a transaction, or the accounts locked first (`lock`), and no deadlock can arise.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import IntegrityError, connection
from django.db.models import Q

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


Wanted = tuple[AccountKind, str | None, str]  # the purpose, the organisation whose it is, and the ref


def account(kind: AccountKind, organisation: Organisation | None = None, ref: str = "") -> LedgerAccount:
    """The account of that purpose, opened at zero when it is first asked for."""
    (row,) = accounts((kind, None if organisation is None else organisation.pk, ref))
    return row


def accounts(*wanted: Wanted) -> list[LedgerAccount]:
    """Several at once, in the order in which they were named."""
    found = _known(wanted)
    missing = [each for each in wanted if each not in found]
    if missing:
        # Others may open the same: then theirs stand, and are seen now that ours have waited for them.
        LedgerAccount.objects.bulk_create([_unopened(each) for each in missing], ignore_conflicts=True)
        found |= _known(missing)
    return [found[each] for each in wanted]


def _unopened(wanted: Wanted) -> LedgerAccount:
    kind, organisation_id, ref = wanted
    floor_uusd = None if kind in WITHOUT_FLOOR else 0
    return LedgerAccount(
        kind=kind, organisation_id=organisation_id, ref=ref, currency="USD", normal=NORMAL[kind], floor_uusd=floor_uusd
    )


def _known(wanted: Sequence[Wanted]) -> dict[Wanted, LedgerAccount]:
    """All of these purposes that have an account; and some others, of the same kinds, refs and organisations."""
    whose = Q(organisation__in={of for _, of, _ in wanted if of is not None})
    if any(of is None for _, of, _ in wanted):
        whose |= Q(organisation=None)
    kinds, refs = {kind for kind, _, _ in wanted}, {ref for _, _, ref in wanted}
    rows = LedgerAccount.objects.filter(whose, kind__in=kinds, ref__in=refs, currency="USD")
    return {(AccountKind(row.kind), row.organisation_id, row.ref): row for row in rows}


def lock(*of: LedgerAccount) -> list[LedgerAccount]:
    """The accounts as they are now, held until the transaction ends, in the order in which they were named."""
    ids = {row.pk for row in of}
    rows = LedgerAccount.objects.filter(pk__in=ids).order_by("pk").select_for_update(no_key=True)
    locked = {row.pk: row for row in rows}
    return [locked[row.pk] for row in of]


def balance_uusd(of: LedgerAccount) -> int:
    """Posted, read anew."""
    return LedgerAccount.objects.get(pk=of.pk).balance_uusd


def post(entries: Sequence[Entry]) -> int:
    """Post all of `entries`, or none; returns how many were new."""
    return _post(entries, at_once=False)


def post_set(entries: Sequence[Entry]) -> int:
    """The same for many entries that are posted at once, each id in it once: set by set, and not one by one."""
    if any(entry.phase != Phase.SINGLE for entry in entries):
        raise ValueError("what is pending is posted one by one")
    return _post(entries, at_once=True)


def _post(entries: Sequence[Entry], *, at_once: bool) -> int:
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
    with connection.cursor() as cursor:
        cursor.execute("SELECT ledger_told(%s, %s::jsonb)", [at_once, json.dumps(batch)])
        answer = json.loads(cursor.fetchone()[0])
    if isinstance(answer, int):
        return answer
    raise _refusal(answer["rule"], answer["words"])


def _refusal(rule: str, words: str) -> Exception:
    """What a rule of the ledger means to the caller; one that no caller can break by asking is a fault of ours."""
    if rule == "ledger_account_floor":
        return InsufficientFunds("there is not enough money on the account")
    if rule in ("ledger_changed_replay", "billing_transfer_pkey"):
        return Conflict("this was already posted with other content", code="changed_replay")
    if rule == "billing_transfer_pending_id_key":
        return Conflict("the pending transfer is already resolved", code="already_resolved")
    return IntegrityError(words)
