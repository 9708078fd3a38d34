"""A lease that is bought, served and charged for, without a market around it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import account, balance_uusd
from marketplace.billing.models import AccountKind, Meter
from marketplace.billing.services.holds import cash, deposit, hold
from marketplace.billing.services.metering import close_meter, observe_beat, open_meter, report_usage

START = datetime(2026, 1, 1, tzinfo=UTC)
RATE = 6_000_000  # 100_000 micro-USD a GPU-minute
MINUTE = RATE // 60
FEE_BPS = 500
USD = 1_000_000


def at(**after: float) -> datetime:
    return START + timedelta(**after)


def organisation(name: str, dollars: int = 0) -> Organisation:
    made = Organisation.objects.create(name=name)
    if dollars:
        deposit(made, dollars * USD, f"pi_{name}_{made.pk}")
    return made


def sold(
    ref: str,
    buyer: Organisation,
    seller: Organisation,
    *,
    minutes: int = 60,
    start: datetime = START,
    close: bool = True,
) -> Meter:
    """One GPU for so many minutes, delivered and charged as they pass."""
    end = start + timedelta(minutes=minutes)
    held = hold(ref, buyer, minutes * MINUTE)
    open_meter(
        ref,
        buyer=buyer,
        seller=seller,
        escrow=held,
        refund=cash(buyer),
        rate_uusd_per_gpu_hour=RATE,
        fee_bps=FEE_BPS,
        gpus=1,
        start_at=start,
        end_at=end,
    )
    for minute in range(minutes + 1):
        observe_beat(ref, start + timedelta(minutes=minute))
    report_usage(ref, 1, minutes * 60_000, at=end)
    if close:
        close_meter(ref, at=end)
    return Meter.objects.get(pk=ref)


def balance(of: Organisation, kind: AccountKind) -> int:
    return balance_uusd(account(kind, of))
