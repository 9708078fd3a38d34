"""From what an agent counted and what we saw of it to money.

Invariant: billable = min(agent's counters, our coverage, window x GPUs), it only grows, and the total captured is the
charge for it exactly. Everything happens under the meter's row lock; accounts are locked after it, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from zlib import crc32

from django.db import connection, transaction
from django.db.models import Sum

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import Entry, account, lock, post
from marketplace.billing.models import AccountKind, LedgerAccount, Meter, MeterState, TransferKind
from marketplace.billing.services.holds import release
from marketplace.core.clock import to_ms
from marketplace.core.errors import Conflict, InsufficientFunds, InvalidInput
from marketplace.core.ids import fact_id
from marketplace.core.money import charge_uusd, fee_uusd

# Silence longer than this is not billed: nobody saw the GPUs.
COVERAGE_GAP_MS = 90_000
# One revenue row would be the queue of every capture.
FEE_SHARDS = 16
# What is agreed when a meter is opened. Its end alone may move, and only to later (`extend_meter`).
TERMS = (
    "buyer_id",
    "seller_id",
    "escrow_id",
    "refund_id",
    "rate_uusd_per_gpu_hour",
    "fee_bps",
    "gpus",
    "start_at",
    "end_at",
    "upstream_id",
)


@transaction.atomic
def open_meter(
    ref: str,
    *,
    buyer: Organisation,
    seller: Organisation,
    escrow: LedgerAccount,
    refund: LedgerAccount,
    rate_uusd_per_gpu_hour: int,
    fee_bps: int,
    gpus: int,
    start_at: datetime,
    end_at: datetime,
    upstream: str | None = None,
) -> Meter:
    """The meter of the lease `ref`; its escrow must hold what the whole window can cost. `upstream` is the meter of the
    holder it was bought of: what is delivered to the new holder, the old one goes on paying for."""
    meter = Meter(
        id=ref,
        buyer=buyer,
        seller=seller,
        escrow=escrow,
        refund=refund,
        rate_uusd_per_gpu_hour=rate_uusd_per_gpu_hour,
        fee_bps=fee_bps,
        gpus=gpus,
        start_at=start_at,
        end_at=end_at,
        upstream_id=upstream,
    )
    (held,) = lock(escrow)
    known = Meter.objects.filter(pk=ref).first()
    if known is not None:
        if any(getattr(known, name) != getattr(meter, name) for name in TERMS):
            raise Conflict("this lease is already metered on other terms", code="changed_replay")
        return known
    if held.available_uusd < charge_uusd(rate_uusd_per_gpu_hour, window_gpu_ms(meter)):
        raise InsufficientFunds("the escrow does not hold the cost of the whole window")
    meter.save(force_insert=True)
    return meter


@transaction.atomic
def extend_meter(ref: str, end_at: datetime) -> Meter:
    """Meter until `end_at` at the same terms; the escrow must already hold what the longer window can still cost.

    The end it has already is no error, so that a repeated call is harmless; an earlier one is: what was sold is not
    taken back here, a lease that ends early leaves its window as it is and is closed."""
    meter = lock_meter(ref)
    if end_at == meter.end_at:
        return meter
    if end_at < meter.end_at:
        raise InvalidInput.at("end_at", "a meter's window is never cut short")
    if meter.state != MeterState.OPEN:
        raise Conflict("this lease is no longer metered", code="meter_closed")
    meter.end_at = end_at
    (held,) = lock(meter.escrow)
    if held.available_uusd < charge_uusd(meter.rate_uusd_per_gpu_hour, window_gpu_ms(meter)) - meter.charged_uusd:
        raise InsufficientFunds("the escrow does not hold the cost of the longer window")
    meter.save(update_fields=["end_at"])
    return meter


def window_gpu_ms(meter: Meter) -> int:
    return (to_ms(meter.end_at) - to_ms(meter.start_at)) * meter.gpus


@transaction.atomic
def observe_beat(ref: str, now: datetime) -> Meter:
    """Note that the agent was seen. A gap of up to 90 s counts in full, a longer one not at all."""
    meter = lock_meter(ref)
    last = meter.last_beat_at
    if meter.state != MeterState.OPEN or (last is not None and now <= last):
        return meter
    if last is not None and to_ms(now) - to_ms(last) <= COVERAGE_GAP_MS:
        inside_ms = min(to_ms(now), to_ms(meter.end_at)) - max(to_ms(last), to_ms(meter.start_at))
        meter.covered_gpu_ms += max(inside_ms, 0) * meter.gpus
    meter.last_beat_at = now
    meter.save(update_fields=["covered_gpu_ms", "last_beat_at"])
    return meter


@transaction.atomic
def report_usage(ref: str, epoch: int, gpu_ms_total: int, source: str = "", *, at: datetime | None = None) -> Meter:
    """Take an agent's cumulative counter and capture what became billable. Late and repeated reports are harmless.
    `source` tells apart the assignments that serve one lease; `at` is when it took effect, if not now."""
    chain = _lock_chain(ref)
    if chain[0].state == MeterState.OPEN:
        note_usage(ref, epoch, gpu_ms_total, source)
        _capture(chain, at)
    return chain[0]


@transaction.atomic
def close_meter(ref: str, *, at: datetime | None = None) -> Meter:
    """Capture what is billable, give back the rest, and take no more."""
    chain = _lock_chain(ref)
    meter = chain[0]
    if meter.state == MeterState.OPEN:
        _capture(chain, at)
        release(meter.escrow, meter.refund)
        meter.state = MeterState.CLOSED
        meter.save(update_fields=["state"])
    return meter


def lock_meter(ref: str) -> Meter:
    """Held until the transaction ends. Whoever also posts to its accounts asks for it first."""
    return Meter.objects.select_for_update(no_key=True).get(pk=ref)


def fee_account(meter: Meter) -> LedgerAccount:
    """The shard of our revenue that the meter's fees go to."""
    return account(AccountKind.FEE_REVENUE, ref=fee_shard(meter.pk))


def fee_shard(ref: str) -> str:
    return f"{crc32(ref.encode()) % FEE_SHARDS:02d}"


@transaction.atomic
def capture(ref: str, *, at: datetime | None = None) -> None:
    """Charge what became billable of one meter and, first, of those above it."""
    chain = _lock_chain(ref)
    if chain[0].state == MeterState.OPEN:
        _capture(chain, at)


def note_usage(ref: str, epoch: int, gpu_ms_total: int, source: str = "") -> None:
    """Keep an agent's cumulative counter; the next tick of `ticking.capture_due` charges what it makes billable. Late
    and repeated reports are harmless. `source` tells apart the assignments that serve one lease."""
    if epoch < 0:
        raise InvalidInput.at("epoch", "must not be negative")
    if not 0 <= gpu_ms_total < 2**53:
        raise InvalidInput.at("gpu_ms_total", "must be between zero and 2**53")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO billing_metercounter AS c (meter_id, source, epoch, gpu_ms_total) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT (meter_id, source, epoch) DO UPDATE SET gpu_ms_total = excluded.gpu_ms_total"
            " WHERE c.gpu_ms_total < excluded.gpu_ms_total",
            [ref, source, epoch, gpu_ms_total],
        )


def _lock_chain(ref: str) -> list[Meter]:
    """The meter, that of the holder it was bought of, and so on; locked from the first holder down."""
    keys = [ref]
    while (above := Meter.objects.filter(pk=keys[-1]).values_list("upstream_id", flat=True).first()) is not None:
        keys.append(above)
    return [lock_meter(key) for key in reversed(keys)][::-1]


def _capture(chain: Sequence[Meter], at: datetime | None) -> None:
    """Post the difference between what is billable now and what was billed. What is billable of a part that was sold on
    counts for its first holder as delivered, and is captured there first: who resells earns nothing they do not pay
    for. The caller holds the meters' locks."""
    billable: list[int] = []
    for meter in chain:
        if billable:
            note_usage(meter.pk, 0, billable[-1], chain[len(billable) - 1].pk)
        billable.append(_billable_gpu_ms(meter))
    for meter, gpu_ms in reversed(list(zip(chain, billable, strict=True))):
        _charge(meter, gpu_ms, at)


def _billable_gpu_ms(meter: Meter) -> int:
    counted = meter.counters.aggregate(total=Sum("gpu_ms_total"))["total"] or 0
    return max(meter.billable_gpu_ms, min(int(counted), meter.covered_gpu_ms, window_gpu_ms(meter)))


def _charge(meter: Meter, billable_gpu_ms: int, at: datetime | None) -> None:
    if billable_gpu_ms <= meter.billable_gpu_ms:
        return
    accrued, revenue = account(AccountKind.SELLER_ACCRUED, meter.seller), fee_account(meter)
    post(advance(meter, billable_gpu_ms, accrued, revenue, at))
    meter.save(update_fields=["billable_gpu_ms", "charged_uusd", "fee_uusd"])


def advance(
    meter: Meter, billable_gpu_ms: int, accrued: LedgerAccount, revenue: LedgerAccount, at: datetime | None
) -> list[Entry]:
    """Bring the meter, unsaved, up to what is billable; what has to be posted for it."""
    charged_uusd = charge_uusd(meter.rate_uusd_per_gpu_hour, billable_gpu_ms)
    ours_uusd = fee_uusd(charged_uusd, meter.fee_bps)
    fee_now_uusd = ours_uusd - meter.fee_uusd
    parts = (
        ("capture", TransferKind.CAPTURE, accrued, charged_uusd - meter.charged_uusd - fee_now_uusd),
        ("fee", TransferKind.FEE, revenue, fee_now_uusd),
    )
    meter.billable_gpu_ms, meter.charged_uusd, meter.fee_uusd = billable_gpu_ms, charged_uusd, ours_uusd
    return [
        Entry(fact_id(name, meter.pk, billable_gpu_ms), kind, meter.escrow, to, amount_uusd, meter.pk, effective_at=at)
        for name, kind, to, amount_uusd in parts
        if amount_uusd
    ]
