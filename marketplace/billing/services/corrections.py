"""Corrections: what a transfer moved, moved back as far as two people agree. The ledger itself is never changed.

Invariant: who asks does not decide; over all corrections no more of a transfer is moved back than it moved.
"""

from __future__ import annotations

import uuid
from datetime import datetime

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Sum

from marketplace.accounts.audit import record
from marketplace.billing.ledger import Entry, account, post
from marketplace.billing.models import (
    CORRECTION_MACHINE,
    AccountKind,
    Correction,
    CorrectionState,
    LedgerAccount,
    Phase,
    Transfer,
    TransferKind,
    correction_id,
)
from marketplace.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from marketplace.core.ids import fact_id
from marketplace.core.money import format_usd


@transaction.atomic
def ask_correction(
    transfer_id: uuid.UUID | str, amount_uusd: int, *, reason: str, by: str, now: datetime, key: str | None = None
) -> Correction:
    """Raises InvalidInput at `amount_uusd` or `reason`, NotFound or Conflict at `transfer_id`. A `key` that was used
    for the same wish gives what was made of it; for another one it is a Conflict."""
    original = _original(transfer_id)
    known = Correction.objects.filter(pk=key).first() if key else None
    if known is not None:
        if (known.original_id, known.amount_uusd, known.asked_by) != (original.pk, amount_uusd, by):
            raise Conflict("this form was used for another correction", code="ticket_used")
        return known
    left = left_uusd(original)
    if not reason.strip():
        raise InvalidInput.at("reason", "say why")
    if not 0 < amount_uusd <= left:
        raise InvalidInput.at(
            "amount_uusd", f"more than nothing, and at most the {format_usd(left, 6)} that is not yet moved back"
        )
    return Correction.objects.create(
        pk=key or correction_id(),
        original=original,
        amount_uusd=amount_uusd,
        reason=reason.strip()[:300],
        asked_by=by,
        asked_at=now,
    )


@transaction.atomic
def approve_correction(key: str, *, by: str, now: datetime) -> Correction:
    """Post it: from where the money went back to where it came from."""
    row = _waiting(key)
    if row.asked_by == by:
        raise Forbidden("who asked for a correction does not decide it", code="second_person")
    original = row.original
    CORRECTION_MACHINE.advance(Correction.objects.filter(pk=key), CorrectionState.POSTED, decided_by=by, decided_at=now)
    name = fact_id("correction", key)
    ref = original.ref or str(original.pk)
    post(
        [
            Entry(
                name,
                TransferKind.CORRECTION,
                original.credit,
                _back_to(original),
                row.amount_uusd,
                ref[:80],
                effective_at=now,
            )
        ]
    )
    for side in {original.debit.organisation, original.credit.organisation} - {None}:
        if side is not None:
            record(side, by, "correction.posted", key, amount_uusd=row.amount_uusd, reason=row.reason)
    row.refresh_from_db()
    return row


@transaction.atomic
def refuse_correction(key: str, *, by: str, now: datetime) -> Correction:
    """Whoever asked may take it back, anybody may refuse."""
    row = _waiting(key)
    CORRECTION_MACHINE.advance(
        Correction.objects.filter(pk=key), CorrectionState.REFUSED, decided_by=by, decided_at=now
    )
    row.refresh_from_db()
    return row


def left_uusd(original: Transfer) -> int:
    """What of it is neither moved back nor asked to be."""
    rows = Correction.objects.filter(original=original, state__in=[CorrectionState.ASKED, CorrectionState.POSTED])
    return original.amount_uusd - int(rows.aggregate(total=Sum("amount_uusd"))["total"] or 0)


def _original(transfer_id: uuid.UUID | str) -> Transfer:
    try:
        rows = Transfer.objects.select_for_update(of=("self",), no_key=True).filter(pk=transfer_id)
        original = rows.first()
    except (ValueError, ValidationError) as error:
        raise NotFound.at("transfer_id", "there is no such transfer") from error
    if original is None:
        raise NotFound.at("transfer_id", "there is no such transfer")
    if original.phase not in (Phase.SINGLE, Phase.CONFIRM) or original.kind == TransferKind.CORRECTION:
        raise Conflict.at("transfer_id", "only what was posted, and is no correction, is corrected", code="not_posted")
    return original


def _back_to(original: Transfer) -> LedgerAccount:
    """Where it came from; what came from an escrow goes to its owner's cash, since what it was held for may be over."""
    source = original.debit
    if source.kind == AccountKind.ESCROW and source.organisation is not None:
        return account(AccountKind.BUYER_CASH, source.organisation)
    return source


def _waiting(key: str) -> Correction:
    rows = Correction.objects.select_related("original__debit__organisation", "original__credit__organisation")
    row = rows.select_for_update(of=("self",), no_key=True).filter(pk=key).first()
    if row is None:
        raise NotFound("there is no such correction")
    if row.state != CorrectionState.ASKED:
        raise Conflict(f"this correction is decided ({row.get_state_display().lower()})", code="decided")
    return row
