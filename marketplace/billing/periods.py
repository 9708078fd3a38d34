"""The period a statement covers. Whole UTC days where a person chooses, any moments where a program does."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

from marketplace.core.errors import InvalidInput

DAYS_DEFAULT = 30
DAYS_MOST = 366


def period(since: datetime | None, until: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    """[since, until): the last thirty days where nothing is said."""
    try:
        until = until or now
        since = since or until - timedelta(days=DAYS_DEFAULT)
        span = until - since
    except OverflowError:
        raise InvalidInput.at("until", "no ledger is that old") from None
    if span <= timedelta(0):
        raise InvalidInput.at("until", "must be after its beginning")
    if span > timedelta(days=DAYS_MOST):
        raise InvalidInput.at("since", f"a statement covers {DAYS_MOST} days at most")
    return since, until


def period_of_days(first: date | None, last: date | None, now: datetime) -> tuple[datetime, datetime]:
    """From the beginning of the first day to the end of the last; an end that is still to come is now."""
    try:
        until = None if last is None else _midnight(last + timedelta(days=1))
        since = None if first is None else _midnight(first)
        if since is None and until is None:
            since = _midnight((now - timedelta(days=DAYS_DEFAULT)).date())
    except OverflowError:
        raise InvalidInput.at("until", "no ledger is that old") from None
    return period(since, None if until is None or until > now else until, now)


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
