"""The audit on the record: every invariant and alarm, when it was looked at, and what was found.

Invariant: what is broken is logged as an error each time it is found, so that an alarm on the log needs no page.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from django.db import connection, transaction

from marketplace.billing.invariants import Breach, alarms, breaches
from marketplace.billing.models import LedgerCheck

logger = logging.getLogger(__name__)

KEPT = timedelta(days=90)
SUBJECTS_KEPT = 20
# The sums over every transfer take longer than a page may; those who are served meanwhile are not held up by reads.
PATIENCE_MS = 300_000
BY_ITSELF = "beat"


def run_audit(now: datetime, by: str = BY_ITSELF, patience_ms: int = PATIENCE_MS) -> LedgerCheck:
    """Look at everything. Raises OperationalError where the database takes longer than `patience_ms` for one check."""
    begun = monotonic()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(patience_ms)])
        broken, raised = breaches(), alarms()
    for breach in broken:
        logger.error("the ledger is broken: %s: %s", breach.invariant, breach.subject)
    for alarm in raised:
        logger.warning("somebody has to look: %s: %s", alarm.invariant, alarm.subject)
    LedgerCheck.objects.filter(ran_at__lt=now - KEPT).delete()
    return LedgerCheck.objects.create(
        ran_at=now,
        took_ms=int((monotonic() - begun) * 1000),
        by=by,
        broken=_by_invariant(broken),
        alarms=_by_invariant(raised),
    )


def _by_invariant(found: Iterable[Breach]) -> list[dict[str, Any]]:
    subjects: dict[str, list[str]] = defaultdict(list)
    for breach in found:
        subjects[breach.invariant].append(breach.subject)
    return [
        {"invariant": name, "count": len(rows), "subjects": rows[:SUBJECTS_KEPT]} for name, rows in subjects.items()
    ]
