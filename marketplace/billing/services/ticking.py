"""The metering tick: what agents counted since the last one becomes money, thousands of meters at a time.

Invariant: as in `metering`: billable = min(agents' counters, coverage, window x GPUs), it only grows, and the total
captured is the charge for it exactly. A meter that cannot be charged holds up no other; one that somebody else holds is
left to them and to the next tick.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime

from django.db import connection, transaction

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import Entry, account, accounts, post_set
from marketplace.billing.models import AccountKind, LedgerAccount, Meter
from marketplace.billing.selectors import BILLABLE
from marketplace.billing.services.metering import advance, capture, fee_shard
from marketplace.core.errors import Problem

logger = logging.getLogger(__name__)

BATCH = 1_000
IN_A_CHAIN = "(m.upstream_id IS NOT NULL OR EXISTS (SELECT FROM billing_meter r WHERE r.upstream_id = m.id))"

DUE = f"""
    SELECT m.id FROM billing_meter m
     WHERE m.state = 'open' AND {IN_A_CHAIN} = %s AND m.billable_gpu_ms < {BILLABLE} ORDER BY m.id
"""  # noqa: S608 - of constants alone
LOCK = f"""
    WITH held AS (
        SELECT m.* FROM billing_meter m WHERE m.id = ANY(%s) AND m.state = 'open' AND NOT {IN_A_CHAIN}
         ORDER BY m.id FOR NO KEY UPDATE OF m SKIP LOCKED)
    SELECT m.id, m.seller_id, m.escrow_id, m.rate_uusd_per_gpu_hour, m.fee_bps, m.billable_gpu_ms,
           m.charged_uusd, m.fee_uusd, {BILLABLE} AS due_gpu_ms FROM held m
"""  # noqa: S608 - of constants alone


def capture_due(now: datetime) -> int:
    """Charge every open meter of which more is billable than was charged; returns how many were."""
    done = 0
    for batch in _batches(_due(in_a_chain=False)):
        done += _capture_batch(batch, now)
    # What was sold on is charged there first, and all the way up: one chain after the other.
    for ref in _due(in_a_chain=True):
        try:
            capture(ref, at=now)
        except Problem:
            logger.exception("meter %s cannot be charged", ref)
        else:
            done += 1
    return done


def _due(*, in_a_chain: bool) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(DUE, [in_a_chain])
        return [ref for (ref,) in cursor.fetchall()]


def _batches(refs: Sequence[str]) -> list[Sequence[str]]:
    return [refs[first : first + BATCH] for first in range(0, len(refs), BATCH)]


def _capture_batch(refs: Sequence[str], now: datetime) -> int:
    """All of them, or where one is refused all but that one."""
    try:
        return _capture_at_once(refs, now)
    except Problem:
        if len(refs) == 1:
            logger.exception("meter %s cannot be charged", refs[0])
            return 0
        half = len(refs) // 2
        return _capture_batch(refs[:half], now) + _capture_batch(refs[half:], now)


@transaction.atomic
def _capture_at_once(refs: Sequence[str], now: datetime) -> int:
    meters = _lock(refs)
    accrued = _accounts_of_sellers(meters)
    shards = {fee_shard(meter.pk) for meter, _ in meters}
    revenue = {row.ref: row for row in accounts(*((AccountKind.FEE_REVENUE, None, shard) for shard in sorted(shards)))}
    entries: list[Entry] = []
    for meter, billable_gpu_ms in meters:
        entries += advance(meter, billable_gpu_ms, accrued[meter.seller_id], revenue[fee_shard(meter.pk)], now)
    post_set(entries)
    _save([meter for meter, _ in meters])
    return len(meters)


def _lock(refs: Sequence[str]) -> list[tuple[Meter, int]]:
    """Those that still are due, with what is billable of each; held until the transaction ends, in id order."""
    with connection.cursor() as cursor:
        cursor.execute(LOCK, [list(refs)])
        found = []
        for ref, seller, escrow, rate, bps, billable, charged, fee, due_gpu_ms in cursor.fetchall():
            meter = Meter(
                id=ref,
                seller_id=seller,
                escrow=LedgerAccount(pk=escrow),
                rate_uusd_per_gpu_hour=rate,
                fee_bps=bps,
                billable_gpu_ms=billable,
                charged_uusd=charged,
                fee_uusd=fee,
            )
            if due_gpu_ms > billable:
                found.append((meter, int(due_gpu_ms)))
    return found


def _accounts_of_sellers(meters: Sequence[tuple[Meter, int]]) -> dict[str, LedgerAccount]:
    sellers = {meter.seller_id for meter, _ in meters}
    rows = LedgerAccount.objects.filter(kind=AccountKind.SELLER_ACCRUED, organisation__in=sellers, ref="")
    found = {str(row.organisation_id): row for row in rows}
    for seller in Organisation.objects.filter(pk__in=sellers - found.keys()):
        found[seller.pk] = account(AccountKind.SELLER_ACCRUED, seller)
    return found


def _save(meters: Sequence[Meter]) -> None:
    rows = [{"id": m.pk, "billable": m.billable_gpu_ms, "charged": m.charged_uusd, "fee": m.fee_uusd} for m in meters]
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE billing_meter m SET billable_gpu_ms = n.billable, charged_uusd = n.charged, fee_uusd = n.fee"
            " FROM jsonb_to_recordset(%s::jsonb) AS n(id text, billable bigint, charged bigint, fee bigint)"
            " WHERE m.id = n.id",
            [json.dumps(rows)],
        )
