"""Refunds: what was charged for a lease that failed its buyer goes back, from where it went to.

Invariant: over all incidents no lease gives back more than it charged, the fee's part comes from the fee, and the
seller's from what they earned of this lease before it became payable, then from their reserve; the rest they owe. An
incident refunds a lease once, whatever is repeated.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from marketplace.accounts.audit import record
from marketplace.billing.ledger import Entry, account, accounts, lock, post
from marketplace.billing.models import AccountKind, Meter, Transfer, TransferKind
from marketplace.billing.services.metering import lock_meter, paid_to
from marketplace.core.errors import Conflict, InvalidInput
from marketplace.core.ids import fact_id
from marketplace.core.money import fee_uusd, format_usd


@dataclass(frozen=True)
class Refund:
    """Where the money came from."""

    from_accrued_uusd: int = 0
    from_reserve_uusd: int = 0
    owed_uusd: int = 0
    from_fee_uusd: int = 0

    @property
    def total_uusd(self) -> int:
        return self.from_accrued_uusd + self.from_reserve_uusd + self.owed_uusd + self.from_fee_uusd


@transaction.atomic
def refund(incident: str, lease_ref: str, amount_uusd: int, *, reason: str, by: str, now: datetime) -> Refund:
    """Give `amount_uusd` of what the lease was charged back to its buyer, at the expense of its seller and of us in the
    proportion in which it was taken. Repeated with the same incident, it is the same refund."""
    meter = lock_meter(lease_ref)
    known = _known(incident, lease_ref)
    if known is not None:
        if known.total_uusd != amount_uusd:
            raise Conflict("this incident was already refunded with another amount", code="changed_replay")
        return known
    left_uusd = meter.charged_uusd - meter.refunded_uusd
    if not 0 < amount_uusd <= left_uusd:
        raise InvalidInput.at("amount_uusd", f"at most {format_usd(left_uusd)} was charged and not given back")
    # Cumulative, like the fee itself: however a refund is cut in parts, the sum is the same.
    kept_fee_uusd = fee_uusd(left_uusd - amount_uusd, meter.fee_bps)
    ours_uusd = meter.fee_uusd - meter.fee_refunded_uusd - kept_fee_uusd
    theirs_uusd = amount_uusd - ours_uusd
    earned_uusd = meter.charged_uusd - meter.fee_uusd
    accrued, revenue, reserve, owed, cash = accounts(
        *paid_to(meter),
        (AccountKind.SELLER_RESERVE, meter.seller_id, ""),
        (AccountKind.SELLER_RECEIVABLE, meter.seller_id, ""),
        (AccountKind.BUYER_CASH, meter.buyer_id, ""),
    )
    accrued, reserve = lock(accrued, reserve)
    unmatured_uusd = earned_uusd - meter.matured_uusd - meter.unmatured_refunds_uusd
    from_accrued = min(theirs_uusd, unmatured_uusd)
    from_reserve = min(theirs_uusd - from_accrued, reserve.available_uusd)
    done = Refund(from_accrued, from_reserve, theirs_uusd - from_accrued - from_reserve, ours_uusd)
    parts = (
        ("accrued", TransferKind.SELLER_REFUND, accrued, done.from_accrued_uusd),
        ("reserve", TransferKind.SELLER_REFUND, reserve, done.from_reserve_uusd),
        ("owed", TransferKind.SELLER_REFUND, owed, done.owed_uusd),
        ("fee", TransferKind.FEE_REFUND, revenue, done.from_fee_uusd),
    )
    post(
        [
            Entry(_name(incident, lease_ref, part), kind, source, cash, amount, lease_ref, effective_at=now)
            for part, kind, source, amount in parts
            if amount
        ]
    )
    meter.refunded_uusd += amount_uusd
    meter.fee_refunded_uusd += ours_uusd
    meter.unmatured_refunds_uusd += from_accrued
    meter.save(update_fields=["refunded_uusd", "fee_refunded_uusd", "unmatured_refunds_uusd"])
    told = {"amount_uusd": amount_uusd, "incident": incident, "reason": reason}
    record(meter.buyer, by, "lease.refunded", lease_ref, **told)
    record(meter.seller, by, "lease.refunded", lease_ref, **told)
    return done


@transaction.atomic
def goodwill(incident: str, lease_ref: str, amount_uusd: int, *, reason: str, by: str, now: datetime) -> None:
    """Give the buyer of a lease money of ours, for a fault of ours."""
    meter = Meter.objects.select_related("buyer").get(pk=lease_ref)
    entry = Entry(
        fact_id("goodwill", incident, lease_ref),
        TransferKind.GOODWILL,
        account(AccountKind.SLA_CREDIT),
        account(AccountKind.BUYER_CASH, meter.buyer),
        amount_uusd,
        lease_ref,
        effective_at=now,
    )
    if post([entry]):
        record(meter.buyer, by, "lease.goodwill", lease_ref, amount_uusd=amount_uusd, incident=incident, reason=reason)


def _known(incident: str, lease_ref: str) -> Refund | None:
    names = {part: _name(incident, lease_ref, part) for part in ("accrued", "reserve", "owed", "fee")}
    rows = dict(Transfer.objects.filter(pk__in=names.values()).values_list("pk", "amount_uusd"))
    if not rows:
        return None
    accrued, reserve, owed, fee = (int(rows.get(name, 0)) for name in names.values())
    return Refund(accrued, reserve, owed, fee)


def _name(incident: str, lease_ref: str, part: str) -> uuid.UUID:
    return fact_id("refund", incident, lease_ref, part)
