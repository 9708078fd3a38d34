"""The one place where an island's state changes, and the sweep that notices silence.

Invariant: a move is a compare-and-swap on the state that was seen, with one event row in the same transaction, and it
wakes the scheduler after commit.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Min, Q
from django.db.models.functions import Coalesce

from marketplace.core.clock import to_ms
from marketplace.core.wake import wake
from marketplace.fleet.liveness import WATCHED, judge, suspect_after_ms
from marketplace.fleet.models import ISLAND_MACHINE, Agent, FleetEvent, Island, IslandState

TICK = "scheduler.tasks.tick"
SWEEP_AT_ONCE = 500


def note(island: Island, kind: str, message: str, *, now: datetime, **detail: Any) -> FleetEvent:
    """A line on the island's page."""
    return FleetEvent.objects.create(island=island, at=now, kind=kind, message=message[:300], detail=detail)


def move(island: Island, to: IslandState, message: str, *, now: datetime, kind: str = "") -> bool:
    """Move the island from the state it was read in; False: somebody else moved it first, or it may not."""
    rows = Island.objects.filter(pk=island.pk, state=island.state)
    with transaction.atomic():
        if not ISLAND_MACHINE.try_advance(rows, to, state_since=now):
            return False
        note(island, kind or to.value, message, now=now, before=island.state)
        wake(TICK)
    island.state, island.state_since = to, now
    return True


def sweep_liveness(now: datetime) -> list[str]:
    """Find islands whose agent is silent for too long; returns the ids of those whose state changed.

    1. Candidates are agents of the current epoch, silent for at least the shorter limit, on an island where silence
       means something.
    2. Each is locked, skipping those a sync holds: they are being heard right now.
    3. Its silence counts from when we were hearing again: after an outage of ours everyone has the time to come back.
    4. Its island moves one step, by compare-and-swap.
    """
    sync_ms = settings.FLEET_SYNC_MS
    since = now - timedelta(milliseconds=suspect_after_ms(sync_ms))
    changed = []
    with transaction.atomic():
        silent = (
            Agent.objects.select_related("island")
            .select_for_update(of=("self",), skip_locked=True, no_key=True)
            .annotate(heard_at=Coalesce("last_seen_at", "enrolled_at"))
            .filter(Q(epoch=F("island__epoch"), island__state__in=WATCHED, heard_at__lte=since))
            .order_by("heard_at")[:SWEEP_AT_ONCE]
        )
        hearing_since = _hearing_since(since) if silent else None
        for agent in silent:
            last = agent.last_seen_at or agent.enrolled_at
            silent_ms = to_ms(now) - to_ms(last)
            blamed_ms = to_ms(now) - to_ms(max(last, hearing_since or last))
            target = judge(agent.island.state, blamed_ms, sync_ms, all_silent=hearing_since is None)
            if target is not None and move(agent.island, target, _words(agent, silent_ms), now=now):
                changed.append(agent.island_id)
    return changed


def _hearing_since(since: datetime) -> datetime | None:
    """From when on somebody was heard without a break; None: nobody was after `since`."""
    heard = Agent.objects.filter(epoch=F("island__epoch"), last_seen_at__gt=since)
    earliest: datetime | None = heard.aggregate(at=Min(Coalesce("heard_since", "enrolled_at")))["at"]
    return earliest


def _words(agent: Agent, silent_ms: int) -> str:
    if agent.draining:
        return "its agent has stopped, as it was asked to"
    return f"no beat of its agent for {silent_ms / 1000:.0f} s"
