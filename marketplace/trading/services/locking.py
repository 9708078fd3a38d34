"""The locks of a trade, and the order in which they are taken.

Invariant: island, SKU, lease, meter, ledger accounts: always in this order, so no two trades wait for each other. Who
sells minutes holds the first three; who only gives minutes back holds the lease, since free minutes that are seen late
are sold late and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import OperationalError, connection

from marketplace.core.errors import Busy, NotFound
from marketplace.fleet.models import Island
from marketplace.trading.models import Lease

LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's lock_timeout ran out
BUSY_RETRY_S = 1


@contextmanager
def waiting_briefly() -> Iterator[None]:
    """A queue that is longer than a person waits becomes an answer that can be tried again."""
    try:
        yield
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
        raise Busy("others are booking this island now; nothing was done", retry_after_s=BUSY_RETRY_S) from error


def find_island(island_id: str, *, locked: bool) -> Island:
    rows = Island.objects.select_related("gpu", "site", "organisation")
    if locked:
        rows = rows.select_for_update(of=("self",), no_key=True)
    island = rows.filter(pk=island_id).first()
    if island is None:
        raise NotFound.at("island_id", "there is no such island")
    return island


def lock_sku(sku_id: str) -> None:
    """Held until the transaction ends. By name and not by row: what is locked is the right to sell of it."""
    number = int.from_bytes(hashlib.sha256(f"sku\x1f{sku_id}".encode()).digest()[:8], signed=True)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [number])


def lock_lease(lease_id: str) -> Lease:
    lease = (
        Lease.objects.select_related("sku__originator", "organisation", "seller")
        .select_for_update(of=("self",), no_key=True)
        .filter(pk=lease_id)
        .first()
    )
    if lease is None:
        raise NotFound("there is no such lease")
    return lease
