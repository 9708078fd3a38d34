"""Where leases take part in an agent's sync: it is seen, it counts, and it is told what to hold.

Invariant: only the leases of the agent's own island are touched by what it says, and no beat counts beyond the moment
a lease ended. An island without leases costs a sync one query here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.models import Exists, OuterRef, Q

from marketplace.billing.services.metering import note_usages, observe_beats
from marketplace.core.clock import minute_of, minute_start, to_ms
from marketplace.fleet.models import Agent, Island
from marketplace.trading.models import Lease, LeasePurpose
from marketplace.trading.selectors import LIVE, held_by, lease_of_piece, pieces_of
from worker_agent.protocol import Assignment, UsageRecord

logger = logging.getLogger(__name__)

# An agent hears of a reservation this long before it starts, and holds it from the start whatever the network does.
AHEAD = timedelta(minutes=2)


def observe_island_beat(agent: Agent, now: datetime) -> None:
    """The agent was seen: that covers its leases, those that have ended up to their end and until they are settled. One
    that still pays for what it sold on is covered for as long as that goes on."""
    running = Q(state__in=LIVE, start_min__lte=minute_of(now)) | Q(settle_at__isnull=False)
    leases = Lease.objects.filter(running, island_id=agent.island_id).annotate(
        passes_on=Exists(Lease.objects.filter(upstream=OuterRef("pk"), settled_at=None))
    )
    rows = leases.values_list("pk", "ended_at", "passes_on")
    observe_beats({key: now if ended_at is None or goes_on else min(now, ended_at) for key, ended_at, goes_on in rows})


def take_island_usage(agent: Agent, records: Sequence[UsageRecord], now: datetime) -> None:
    """Keep what the agent counted for the leases of its island, for the next metering tick; a lease that is settled
    takes no more."""
    highest: dict[str, int] = {}
    for each in records:
        highest[each.assignment_id] = max(each.gpu_ms_total, highest.get(each.assignment_id, 0))
    keys = {lease_of_piece(assignment_id) for assignment_id in highest}
    rows = Lease.objects.filter(pk__in=keys, island_id=agent.island_id).select_related("sku").order_by("pk")
    leases = {lease.pk: lease for lease in rows.annotate(was_cut=Exists(Lease.objects.filter(upstream=OuterRef("pk"))))}
    most = _most_gpu_ms([lease for lease in leases.values() if lease.was_cut])
    counted: dict[tuple[str, str], int] = {}
    for assignment_id in highest:
        lease = leases.get(lease_of_piece(assignment_id))
        if lease is None or lease.settled_at is not None:
            continue
        gpu_ms = highest[assignment_id]
        if lease.was_cut:
            # Its window is not its own alone any longer: nothing counts beyond the piece that was served.
            gpu_ms = min(gpu_ms, most.get(assignment_id, 0))
        counted[lease.pk, "" if assignment_id == lease.pk else assignment_id] = gpu_ms
    note_usages(agent.epoch, counted)
    strangers = sorted(keys - leases.keys())
    if strangers:
        logger.warning("%s reported usage of what its island never held: %s", agent, ", ".join(strangers[:5]))


def _most_gpu_ms(leases: Sequence[Lease]) -> dict[str, int]:
    """The most that each piece of these leases can have delivered, by its id."""
    pieces = pieces_of(leases) if leases else {}
    most = {}
    for lease in leases:
        for piece in pieces[lease.pk]:
            end_ms = to_ms(minute_start(piece.end_min))
            until_ms = end_ms if lease.ended_at is None else min(end_ms, to_ms(lease.ended_at))
            length_ms = max(0, until_ms - to_ms(minute_start(piece.start_min)))
            most[piece.id] = length_ms * piece.lots * lease.sku.gpus_per_lot
    return most


def reservations(island: Island, now: datetime) -> list[Assignment]:
    """What the island holds for buyers who reserved it. Leases for jobs are the training domain's to assign."""
    soon, now_min = minute_of(now + AHEAD), minute_of(now)
    leases = list(
        held_by(island)
        .filter(purpose=LeasePurpose.RESERVE, start_min__lte=soon, end_min__gt=now_min)
        .select_related("sku")
    )
    pieces = pieces_of(leases) if leases else {}
    return [
        Assignment(
            id=piece.id,
            generation=lease.generation,
            kind="reserve",
            gpus=piece.lots * lease.sku.gpus_per_lot,
            start_at_ms=to_ms(minute_start(piece.start_min)),
            stop_at_ms=to_ms(minute_start(piece.end_min)),
        )
        for lease in leases
        for piece in pieces[lease.pk]
        if piece.start_min <= soon and piece.end_min > now_min
    ]


def holders(island: Island, now: datetime) -> list[str]:
    """Who holds GPUs of the island now or later, in words."""
    return [f"lease {lease_id}" for lease_id in held_by(island).values_list("pk", flat=True)]
