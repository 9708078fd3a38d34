"""Where leases take part in an agent's sync: it is seen, it counts, and it is told what to hold.

Invariant: only the leases of the agent's own island are touched by what it says, and no beat counts beyond the moment
a lease ended. An island without leases costs a sync one query here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.models import Q

from marketplace.billing.services.metering import observe_beat, report_usage
from marketplace.core.clock import minute_of, minute_start, to_ms
from marketplace.fleet.models import Agent, Island
from marketplace.trading.models import Lease, LeasePurpose
from marketplace.trading.selectors import LIVE, held_by
from worker_agent.protocol import Assignment, UsageRecord

logger = logging.getLogger(__name__)

# An agent hears of a reservation this long before it starts, and holds it from the start whatever the network does.
AHEAD = timedelta(minutes=2)


def observe_island_beat(agent: Agent, now: datetime) -> None:
    """The agent was seen: that covers its leases, those that have ended up to their end and until they are settled."""
    running = Q(state__in=LIVE, start_min__lte=minute_of(now)) | Q(settle_at__isnull=False)
    leases = Lease.objects.filter(running, island_id=agent.island_id).order_by("pk").values_list("pk", "ended_at")
    for lease_id, ended_at in leases:
        observe_beat(lease_id, now if ended_at is None else min(now, ended_at))


def take_island_usage(agent: Agent, records: Sequence[UsageRecord], now: datetime) -> None:
    """Count what the agent delivered to the leases of its island; a lease that is settled takes no more."""
    highest: dict[str, int] = {}
    for each in records:
        highest[each.assignment_id] = max(each.gpu_ms_total, highest.get(each.assignment_id, 0))
    settled = dict(
        Lease.objects.filter(pk__in=highest, island_id=agent.island_id).order_by("pk").values_list("pk", "settled_at")
    )
    for lease_id, settled_at in settled.items():
        if settled_at is None:
            report_usage(lease_id, agent.epoch, highest[lease_id])
    strangers = sorted(highest.keys() - settled.keys())
    if strangers:
        logger.warning("%s reported usage of what its island never held: %s", agent, ", ".join(strangers[:5]))


def reservations(island: Island, now: datetime) -> list[Assignment]:
    """What the island holds for buyers who reserved it. Leases for jobs are the training domain's to assign."""
    leases = held_by(island).filter(
        purpose=LeasePurpose.RESERVE, start_min__lte=minute_of(now + AHEAD), end_min__gt=minute_of(now)
    )
    return [
        Assignment(
            id=lease.pk,
            generation=lease.generation,
            kind="reserve",
            gpus=lease.gpus,
            start_at_ms=to_ms(minute_start(lease.start_min)),
            stop_at_ms=to_ms(minute_start(lease.end_min)),
        )
        for lease in leases
    ]


def holders(island: Island, now: datetime) -> list[str]:
    """Who holds GPUs of the island now or later, in words."""
    return [f"lease {lease_id}" for lease_id in held_by(island).values_list("pk", flat=True)]
