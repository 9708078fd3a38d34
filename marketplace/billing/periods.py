"""The period a statement covers. Whole UTC days where a person chooses, any moments where a program does.

Invariant: what leaves here is a moment after the first ledger and at most a year, so no question is too wide to answer.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

from marketplace.core.errors import InvalidInput

DAYS_DEFAULT = 30
DAYS_MOST = 366
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)  # nothing of ours is older


def period(since: datetime | None, until: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    """[since, until): the last thirty days where nothing is said."""
    until = until or now
    if until <= EARLIEST:
        raise InvalidInput.at("until", "no ledger is that old")
    since = since or max(until - timedelta(days=DAYS_DEFAULT), EARLIEST)
    if since < EARLIEST:
        raise InvalidInput.at("since", "no ledger is that old")
    if since >= until:
        raise InvalidInput.at("until", "must be after its beginning")
    if until - since > timedelta(days=DAYS_MOST):
        raise InvalidInput.at("since", f"a statement covers {DAYS_MOST} days at most")
    return since, until


def period_of_days(first: date | None, last: date | None, now: datetime) -> tuple[datetime, datetime]:
    """From the beginning of the first day to the end of the last; an end that is still to come is now."""
    until = now if last is None or last >= now.date() else _midnight(last + timedelta(days=1))
    if first is None:
        first = (until - timedelta(days=DAYS_DEFAULT)).date() if until > EARLIEST else EARLIEST.date()
    return period(max(_midnight(first), EARLIEST), until, now)


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
