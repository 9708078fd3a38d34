"""From what an agent counted and what we saw of it to money.

Invariant: billable = min(agent's counters, our coverage, window x GPUs), it only grows, and the total captured is the
charge for it exactly. Everything happens under the meter's row lock; accounts are locked after it, never before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from zlib import crc32

from django.db import connection, transaction
from django.db.models import Sum

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import Entry, Wanted, accounts, lock, post
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


# Locked in id order; what two beats tell at once counts once, since the second sees the first one's row.
OBSERVE = """
    WITH seen AS (SELECT * FROM jsonb_to_recordset(%s::jsonb) AS s(id text, at timestamptz)),
    held AS (
        SELECT m.id, s.at, greatest(0,
                   floor(extract(epoch FROM least(s.at, m.end_at)) * 1000)
                   - floor(extract(epoch FROM greatest(m.last_beat_at, m.start_at)) * 1000))::bigint * m.gpus AS gpu_ms,
               floor(extract(epoch FROM s.at) * 1000) - floor(extract(epoch FROM m.last_beat_at) * 1000) AS gap_ms
          FROM billing_meter m JOIN seen s ON s.id = m.id
         WHERE m.state = 'open' AND (m.last_beat_at IS NULL OR m.last_beat_at < s.at)
         ORDER BY m.id FOR NO KEY UPDATE OF m)
    UPDATE billing_meter m
       SET last_beat_at = h.at,
           covered_gpu_ms = m.covered_gpu_ms + CASE WHEN h.gap_ms <= %s THEN h.gpu_ms ELSE 0 END
      FROM held h WHERE h.id = m.id
"""


def observe_beat(ref: str, now: datetime) -> None:
    """Note that the agent was seen. A gap of up to 90 s counts in full, a longer one not at all."""
    observe_beats({ref: now})


def observe_beats(seen: Mapping[str, datetime]) -> None:
    """The same of many meters, each at its own time."""
    if not seen:
        return
    rows = [{"id": ref, "at": at.isoformat()} for ref, at in seen.items()]
    with connection.cursor() as cursor:
        cursor.execute(OBSERVE, [json.dumps(rows), COVERAGE_GAP_MS])


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


def paid_to(meter: Meter) -> tuple[Wanted, Wanted]:
    """Where what is charged goes: to the seller, and the meter's shard of our revenue."""
    return (AccountKind.SELLER_ACCRUED, meter.seller_id, ""), (AccountKind.FEE_REVENUE, None, fee_shard(meter.pk))


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
    note_usages(epoch, {(ref, source): gpu_ms_total})


def note_usages(epoch: int, totals: Mapping[tuple[str, str], int]) -> None:
    """The same of many counters, each the GPU-ms of a meter and source."""
    if epoch < 0:
        raise InvalidInput.at("epoch", "must not be negative")
    if not all(0 <= total < 2**53 for total in totals.values()):
        raise InvalidInput.at("gpu_ms_total", "must be between zero and 2**53")
    if not totals:
        return
    rows = sorted((ref, source, total) for (ref, source), total in totals.items())
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO billing_metercounter AS c (meter_id, source, epoch, gpu_ms_total)"
            " SELECT n.ref, n.source, %s, n.total FROM unnest(%s::text[], %s::text[], %s::bigint[])"
            " AS n(ref, source, total)"
            " ON CONFLICT (meter_id, source, epoch) DO UPDATE SET gpu_ms_total = excluded.gpu_ms_total"
            " WHERE c.gpu_ms_total < excluded.gpu_ms_total",
            [epoch, *(list(column) for column in zip(*rows, strict=True))],
        )


# From the first holder down: whoever locks a chain locks it in this order.
CHAIN = """
    WITH RECURSIVE above AS (
        SELECT id, upstream_id, 0 AS height FROM billing_meter WHERE id = %s
        UNION ALL
        SELECT m.id, m.upstream_id, a.height + 1 FROM billing_meter m JOIN above a ON m.id = a.upstream_id)
    SELECT m.* FROM billing_meter m JOIN above a ON a.id = m.id ORDER BY a.height DESC FOR NO KEY UPDATE OF m
"""


def _lock_chain(ref: str) -> list[Meter]:
    """The meter, that of the holder it was bought of, and so on; locked from the first holder down."""
    chain = list(Meter.objects.raw(CHAIN, [ref]))[::-1]
    if not chain:
        raise Meter.DoesNotExist(ref)
    return chain


def _capture(chain: Sequence[Meter], at: datetime | None) -> None:
    """Post the difference between what is billable now and what was billed. What is billable of a part that was sold on
    counts for its first holder as delivered, and is captured there first: who resells earns nothing they do not pay
    for. The caller holds the meters' locks."""
    billable: list[int] = []
    for meter in chain:
        if billable:
            note_usage(meter.pk, 0, billable[-1], chain[len(billable) - 1].pk)
        billable.append(_billable_gpu_ms(meter))
    due = [pair for pair in zip(chain, billable, strict=True) if pair[1] > pair[0].billable_gpu_ms]
    to = accounts(*(wanted for meter, _ in due for wanted in paid_to(meter))) if due else []
    charges = [
        advance(meter, gpu_ms, accrued, revenue, at)
        for (meter, gpu_ms), accrued, revenue in zip(due, to[::2], to[1::2], strict=True)
    ]
    post([entry for charge in reversed(charges) for entry in charge])
    for meter, _ in due:
        meter.save(update_fields=["billable_gpu_ms", "charged_uusd", "fee_uusd"])


def _billable_gpu_ms(meter: Meter) -> int:
    counted = meter.counters.aggregate(total=Sum("gpu_ms_total"))["total"] or 0
    return max(meter.billable_gpu_ms, min(int(counted), meter.covered_gpu_ms, window_gpu_ms(meter)))


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
