"""Telling a worker that there is something to do, by task name, once what was done is durable.

Invariant: a wake-up carries no work. The rows hold it and the beat's sweep finds it, so a wake-up that is lost costs
one interval of the sweep and nothing else: a broker that is away never fails the request that wanted to wake.
"""

from __future__ import annotations

import logging

from celery import current_app
from django.conf import settings
from django.db import transaction
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)

# Older than this the sweep has long done it: a broker that was away must not come back with a heap of them.
EXPIRES_S = 30


def wake(task_name: str) -> None:
    """Send the task, without arguments, after the transaction in progress; at once where there is none."""
    if settings.WAKE_UPS:
        transaction.on_commit(lambda: _send(task_name))


def _send(task_name: str) -> None:
    try:
        current_app.send_task(task_name, expires=EXPIRES_S)
    except OperationalError as error:
        logger.warning("%s was not woken, its sweep will find the work: %s", task_name, error)
