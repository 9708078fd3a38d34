"""Time: one source, the database's clock, and integer UTC minutes for positions.

Invariant: expiry, heartbeat age and billing compare database times only; an agent's clock is recorded, never trusted.
Services take `now` as an argument; the edge (view, task, command) reads it once with `database_now()`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db import connection

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def database_now() -> datetime:
    """The database's wall clock, moving also inside a transaction (`clock_timestamp`, not `now`)."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        (value,) = cursor.fetchone()
    return value


def to_ms(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(milliseconds=1)


def from_ms(milliseconds: int) -> datetime:
    return EPOCH + timedelta(milliseconds=milliseconds)


def minute_of(moment: datetime) -> int:
    """The UTC minute in progress, as minutes since the epoch."""
    return (moment - EPOCH) // timedelta(minutes=1)


def minute_start(minute: int) -> datetime:
    return EPOCH + timedelta(minutes=minute)
