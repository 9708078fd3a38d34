"""What an organisation is shown of its fleet.

Invariant: every query here starts from an organisation, so another one's island looks like none; a secret or its hash
is in no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.models import F, QuerySet

from marketplace.accounts.models import Organisation
from marketplace.core.errors import NotFound
from marketplace.fleet.models import Agent, FleetEvent, Island, JoinToken, Site


def sites_of(organisation: Organisation) -> QuerySet[Site]:
    return Site.objects.filter(organisation=organisation).order_by("name")


def site_for(organisation: Organisation, site_id: str) -> Site:
    site = Site.objects.filter(organisation=organisation, pk=site_id).first()
    if site is None:
        raise NotFound("there is no such site")
    return site


def islands_of(organisation: Organisation) -> QuerySet[Island]:
    """Newest first; the retired ones at the end of what a page shows is the page's affair."""
    return (
        Island.objects.filter(organisation=organisation)
        .select_related("site", "gpu", "organisation")
        .order_by("-created_at", "-id")
    )


def island_for(organisation: Organisation, island_id: str) -> Island:
    island = islands_of(organisation).filter(pk=island_id).first()
    if island is None:
        raise NotFound("there is no such island")
    return island


def current_agent(island: Island) -> Agent | None:
    """The agent of the island's epoch, unless it was revoked."""
    return Agent.objects.filter(island=island, epoch=island.epoch, revoked_at__isnull=True).first()


def current_agents(islands: Sequence[Island]) -> dict[str, Agent]:
    """The current agents of many islands in one query, by island id."""
    ids = [island.pk for island in islands]
    found = Agent.objects.filter(island__in=ids, epoch=F("island__epoch"), revoked_at__isnull=True)
    return {agent.island_id: agent for agent in found}


def events_of(island: Island) -> QuerySet[FleetEvent]:
    return FleetEvent.objects.filter(island=island).order_by("-at", "-id")


def live_tokens(island: Island, now: datetime) -> QuerySet[JoinToken]:
    """Join tokens that would still be taken."""
    return JoinToken.objects.filter(
        island=island, used_at__isnull=True, revoked_at__isnull=True, expires_at__gt=now
    ).order_by("-created_at")
