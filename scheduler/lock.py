"""Who may apply decisions now: one holder, for a while, by the database's clock.

Invariant: a token that no longer stands in the row, or whose time is over, applies nothing. A holder that died holds
up nobody longer than HELD_FOR.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

from django.db.models import Q

from marketplace.core.errors import Conflict
from marketplace.training.models import SchedulerLock

NAME = "placement"
HELD_FOR = timedelta(seconds=30)


def acquire(now: datetime) -> uuid.UUID | None:
    """The token of a new hold; None while somebody else's stands."""
    token = uuid.uuid4()
    SchedulerLock.objects.get_or_create(name=NAME)
    free = Q(token=None) | Q(expires_at__lte=now)
    taken = SchedulerLock.objects.filter(free, name=NAME).update(token=token, expires_at=now + HELD_FOR)
    return token if taken else None


def release(token: uuid.UUID) -> None:
    SchedulerLock.objects.filter(name=NAME, token=token).update(token=None, expires_at=None)


def demand(token: uuid.UUID, now: datetime) -> None:
    """Keep the hold until the caller's transaction ends, or refuse. Call inside one."""
    rows = SchedulerLock.objects.select_for_update(no_key=True)
    if not rows.filter(name=NAME, token=token, expires_at__gt=now).exists():
        raise Conflict("somebody else schedules now", code="lock_lost")
