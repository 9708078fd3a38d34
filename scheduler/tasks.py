"""The scheduler's Celery entry points. A task carries nothing: it looks at the rows, and mends what is not right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from celery import shared_task

from marketplace.core.clock import database_now
from marketplace.fleet.services import sweep_liveness
from marketplace.trading.services import sweep_leases, sweep_orders
from marketplace.training import services as training
from scheduler import lock
from scheduler.apply import apply
from scheduler.policy.placement import decide
from scheduler.reconcile import reconcile
from scheduler.snapshot import read_market

logger = logging.getLogger(__name__)

SWEEPS: tuple[Callable[[datetime], object], ...] = (
    sweep_liveness,
    sweep_leases,
    training.sweep_members,
    reconcile,
    training.sweep_rounds,
    training.advance_jobs,
)


@shared_task(name="scheduler.tasks.tick")
def tick() -> int:
    """Look, decide, apply; at once back when another worker does."""
    token = lock.acquire(database_now())
    if token is None:
        return 0
    try:
        return apply(decide(read_market(database_now())), token)
    finally:
        lock.release(token)


@shared_task(name="scheduler.tasks.sweep")
def sweep() -> None:
    """What time alone brings. One sweep that fails holds up no other, and is told of when all have run."""
    failures: list[Exception] = []
    for each in SWEEPS:
        try:
            each(database_now())
        except Exception as error:
            logger.exception("%s failed", each.__name__)
            failures.append(error)
    if failures:
        raise ExceptionGroup("some sweeps failed", failures)


@shared_task(name="scheduler.tasks.clear")
def clear() -> int:
    """Fill the orders that stand as the book allows now."""
    return sweep_orders(database_now())


@shared_task(name="scheduler.tasks.tidy")
def tidy() -> int:
    """Drop what the artifact store need not keep."""
    return training.sweep_blobs(database_now())
