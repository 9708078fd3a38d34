"""From earned to payable: the dispute window passes, a part is kept in reserve, and what is owed to us is set off.

Invariant: of what a meter captured for its seller, what matured and what was taken back before never exceed it; a
sweep that runs twice moves nothing twice, because every transfer is named by the high-water mark it moves. Nothing of a
frozen seller, or of a frozen buyer's leases, becomes payable.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, Subquery, Sum

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import Entry, account, accounts, lock, post
from marketplace.billing.models import AccountKind, LedgerAccount, Meter, Phase, Transfer, TransferKind
from marketplace.billing.services.freezing import standing
from marketplace.billing.services.metering import lock_meter
from marketplace.core.ids import fact_id

logger = logging.getLogger(__name__)

SWEEP_BATCH = 1_000
BPS = 10_000
POSTED = [Phase.SINGLE, Phase.CONFIRM]


def mature_earnings(now: datetime) -> int:
    """Make payable what was earned before the dispute window; returns how many leases moved."""
    until = now - timedelta(hours=settings.DISPUTE_WINDOW_HOURS)
    frozen = standing().values("organisation")
    old = Transfer.objects.filter(ref=OuterRef("pk"), kind=TransferKind.CAPTURE, effective_at__lt=until)
    outstanding = Meter.objects.filter(
        Exists(old),
        ~Q(seller__in=frozen),
        ~Q(buyer__in=frozen),
        charged_uusd__gt=F("fee_uusd") + F("matured_uusd") + F("unmatured_refunds_uusd"),
    )
    keys = list(outstanding.order_by("pk").values_list("pk", flat=True)[:SWEEP_BATCH])
    return sum(_mature(key, until, now) for key in keys)


def release_reserves(now: datetime) -> int:
    """Make payable what was kept for long enough; returns of how many sellers."""
    frozen = standing().values("organisation")
    kept = LedgerAccount.objects.filter(
        kind=AccountKind.SELLER_RESERVE, credits_posted_uusd__gt=F("debits_posted_uusd") + F("debits_pending_uusd")
    )
    old = Transfer.objects.filter(credit=OuterRef("pk"), effective_at__lt=_kept_until(now), phase__in=POSTED)
    total = old.order_by().values("credit").annotate(total=Sum("amount_uusd")).values("total")
    due = kept.annotate(old_uusd=Subquery(total)).filter(old_uusd__gt=F("debits_posted_uusd"))
    rows = due.exclude(organisation__in=frozen).select_related("organisation")
    return sum(_release_reserve(row, now) for row in rows.order_by("pk"))


def _kept_until(now: datetime) -> datetime:
    return now - timedelta(days=settings.SELLER_RESERVE_DAYS)


@transaction.atomic
def _mature(key: str, until: datetime, now: datetime) -> bool:
    meter = lock_meter(key)
    captured = Transfer.objects.filter(ref=key, kind=TransferKind.CAPTURE, effective_at__lt=until)
    earned_uusd = int(captured.aggregate(total=Sum("amount_uusd"))["total"] or 0)
    due_uusd = earned_uusd - meter.matured_uusd - meter.unmatured_refunds_uusd
    if due_uusd <= 0:
        return False
    seller = meter.seller
    kinds = (AccountKind.SELLER_ACCRUED, AccountKind.SELLER_PAYABLE, AccountKind.SELLER_RESERVE)
    accrued, payable, reserve = accounts(*((kind, seller.pk, "") for kind in kinds))
    kept_uusd = due_uusd * settings.SELLER_RESERVE_BPS // BPS if _is_new(seller, now) else 0
    entries = []
    if due_uusd > kept_uusd:
        name = fact_id("mature", key, meter.matured_uusd)
        entries.append(Entry(name, TransferKind.MATURE, accrued, payable, due_uusd - kept_uusd, key, effective_at=now))
    if kept_uusd:
        name = fact_id("reserve", key, meter.matured_uusd)
        entries.append(Entry(name, TransferKind.RESERVE, accrued, reserve, kept_uusd, key, effective_at=now))
    post(entries)
    meter.matured_uusd += due_uusd
    meter.save(update_fields=["matured_uusd"])
    set_off(seller, now)
    return True


@transaction.atomic
def _release_reserve(row: LedgerAccount, now: datetime) -> bool:
    (reserve,) = lock(row)
    organisation = row.organisation
    if organisation is None:
        return False
    old = Transfer.objects.filter(credit=reserve, effective_at__lt=_kept_until(now), phase__in=POSTED)
    kept = old.aggregate(total=Sum("amount_uusd"))["total"]
    # What has left it was the oldest.
    due_uusd = min(int(kept or 0) - reserve.debits_posted_uusd, reserve.available_uusd)
    if due_uusd <= 0:
        return False
    payable = account(AccountKind.SELLER_PAYABLE, organisation)
    name = fact_id("reserve-release", reserve.pk, reserve.debits_posted_uusd)
    post([Entry(name, TransferKind.RESERVE_RELEASE, reserve, payable, due_uusd, effective_at=now)])
    set_off(organisation, now)
    return True


@transaction.atomic
def set_off(seller: Organisation, now: datetime) -> int:
    """What a seller owes us is paid from what became payable to them; returns how much."""
    owed = LedgerAccount.objects.filter(kind=AccountKind.SELLER_RECEIVABLE, organisation=seller).first()
    if owed is None or owed.balance_uusd <= 0:
        return 0
    payable, owed = lock(account(AccountKind.SELLER_PAYABLE, seller), owed)
    amount_uusd = min(payable.available_uusd, owed.available_uusd)
    if amount_uusd <= 0:
        return 0
    name = fact_id("set-off", owed.pk, owed.credits_posted_uusd)
    post([Entry(name, TransferKind.SET_OFF, payable, owed, amount_uusd, effective_at=now)])
    return amount_uusd


def _is_new(seller: Organisation, now: datetime) -> bool:
    first = Meter.objects.filter(seller=seller, charged_uusd__gt=0).order_by("start_at").first()
    return first is not None and first.start_at > now - timedelta(days=settings.SELLER_NEW_DAYS)
