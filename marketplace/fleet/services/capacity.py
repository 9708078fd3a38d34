"""What a seller says of sites and islands: registering, changing terms, retiring.

Invariant: every write carries its audit row and its event in its own transaction. What an island is made of (GPU,
count, lots) never changes after registration, because leases were sold on it; its terms do, for leases to come.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Unpack

from django.db import IntegrityError, transaction

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.catalog.models import GpuModel
from marketplace.core.errors import Conflict, FieldProblem, InvalidInput
from marketplace.core.money import format_usd
from marketplace.core.wake import wake
from marketplace.fleet import hooks
from marketplace.fleet.models import Agent, Island, IslandState, JoinToken, Site
from marketplace.fleet.selectors import island_for
from marketplace.fleet.services.states import TICK, move, note
from marketplace.fleet.terms import Terms, clean_name, problems_of_name, problems_of_size, problems_of_terms

REGION_LENGTH_MAX = 80
_COUNTRY = re.compile(r"[A-Z]{2}")
# None for these says "not stated any more"; for the others it says nothing.
_MAY_BE_UNSTATED = {"available_until", "wan_up_mbps", "wan_down_mbps", "preempt_notice_s"}


def register_site(actor: Actor, *, name: str, now: datetime, country: str = "", region: str = "") -> Site:
    demand(actor, Action.SELL)
    name, country, region = clean_name(name), country.strip().upper(), clean_name(region)
    problems = list(problems_of_name(name))
    if country and not _COUNTRY.fullmatch(country):
        problems.append(FieldProblem("country", "two letters, as in ISO 3166: DE, US, JP"))
    if len(region) > REGION_LENGTH_MAX or not region.isprintable():
        problems.append(FieldProblem("region", f"at most {REGION_LENGTH_MAX} printable characters"))
    if problems:
        raise _refusal(problems)
    try:
        with transaction.atomic():
            site = Site.objects.create(
                organisation=actor.organisation, name=name, country=country, region=region, created_at=now
            )
            record(actor.organisation, actor.name, "site.registered", site.id, name=name)
    except IntegrityError as error:
        raise Conflict.at("name", "you have a site of this name", code="name_taken") from error
    return site


def register_island(
    actor: Actor,
    *,
    site_id: str,
    name: str,
    gpu: str,
    gpu_count: int,
    price_uusd_per_gpu_hour: int,
    available_from: datetime,
    now: datetime,
    gpus_per_lot: int = 1,
    available_until: datetime | None = None,
    min_lease_min: int = 1,
    wan_up_mbps: int | None = None,
    wan_down_mbps: int | None = None,
    preemptible: bool = False,
    preempt_notice_s: int | None = None,
    simulated: bool = False,
) -> Island:
    """An island waits for its agent from here on; it can be enrolled with a join token."""
    demand(actor, Action.SELL)
    terms: dict[str, Any] = {
        "name": clean_name(name),
        "price_uusd_per_gpu_hour": price_uusd_per_gpu_hour,
        "available_from": available_from,
        "available_until": available_until,
        "min_lease_min": min_lease_min,
        "wan_up_mbps": wan_up_mbps,
        "wan_down_mbps": wan_down_mbps,
        "preemptible": preemptible,
        "preempt_notice_s": preempt_notice_s,
    }
    problems = [*problems_of_terms(terms), *problems_of_size(gpu_count, gpus_per_lot)]
    model = GpuModel.objects.filter(pk=gpu).first()
    if model is None:
        problems.append(FieldProblem("gpu", f"{gpu!r} is no GPU we know; see /api/v1/gpus"))
    site = Site.objects.filter(organisation=actor.organisation, pk=site_id).first()
    if site is None:
        problems.append(FieldProblem("site_id", "there is no such site"))
    if problems or model is None or site is None:
        raise _refusal(problems)
    try:
        with transaction.atomic():
            island = Island.objects.create(
                site=site,
                organisation=actor.organisation,
                gpu=model,
                gpu_count=gpu_count,
                gpus_per_lot=gpus_per_lot,
                simulated=simulated,
                state_since=now,
                created_at=now,
                **terms,
            )
            record(actor.organisation, actor.name, "island.registered", island.id, name=island.name, gpu=gpu)
            note(island, "registered", f"{gpu_count} × {island.gpu.name} registered", now=now)
    except IntegrityError as error:
        raise Conflict.at("name", "this site has an island of this name", code="name_taken") from error
    return island


def register_island_at(
    actor: Actor, *, site_id: str | None, site_name: str, country: str, now: datetime, **island: Any
) -> Island:
    """An island at a known site, or, where `site_id` is None, at a new one: both are made or neither."""
    with transaction.atomic():
        if site_id is None:
            site_id = register_site(actor, name=site_name, country=country, now=now).pk
        return register_island(actor, site_id=site_id, now=now, **island)


def change_island(actor: Actor, island_id: str, *, now: datetime, **changes: Unpack[Terms]) -> Island:
    """New terms, for leases from now on. An absent key is left as it is; so is None, where it cannot mean unstated."""
    demand(actor, Action.SELL)
    island_for(actor.organisation, island_id)
    wanted = {key: value for key, value in changes.items() if value is not None or key in _MAY_BE_UNSTATED}
    if "name" in wanted:
        wanted["name"] = clean_name(str(wanted["name"]))
    try:
        with transaction.atomic():
            island = _locked(island_id)
            if island.state == IslandState.RETIRED:
                raise Conflict("a retired island has no terms to change", code="retired")
            before = {key: getattr(island, key) for key in Terms.__annotations__}
            problems = list(problems_of_terms({**before, **wanted}))
            if problems:
                raise _refusal(problems)
            changed = {key: value for key, value in wanted.items() if value != before[key]}
            if not changed:
                return island
            for key, value in changed.items():
                setattr(island, key, value)
            island.save(update_fields=sorted(changed))
            told = {key: [_plain(before[key]), _plain(value)] for key, value in changed.items()}
            record(actor.organisation, actor.name, "island.changed", island.id, changes=told)
            kind, words = _news(changed)
            note(island, kind, words, now=now, changes=told)
            wake(TICK)
    except IntegrityError as error:
        raise Conflict.at("name", "this site has an island of this name", code="name_taken") from error
    return island


def retire_island(actor: Actor, island_id: str, *, now: datetime) -> Island:
    """Take the island off the market for good. Refused while somebody holds GPUs on it; twice is once."""
    demand(actor, Action.SELL)
    island_for(actor.organisation, island_id)
    with transaction.atomic():
        # The agent's row before the island's, as in a sync.
        agents = Agent.objects.filter(island_id=island_id, revoked_at__isnull=True)
        live = list(agents.select_for_update(no_key=True).order_by("pk"))
        island = _locked(island_id)
        if island.state == IslandState.RETIRED:
            return island
        holders = hooks.holders_of(island, now)
        if holders:
            raise Conflict(f"the island is in use: {', '.join(holders[:3])}", code="island_in_use")
        Agent.objects.filter(pk__in=[agent.pk for agent in live]).update(
            revoked_at=now, revoked_why="its island was retired"
        )
        JoinToken.objects.filter(island=island, used_at__isnull=True, revoked_at__isnull=True).update(revoked_at=now)
        Island.objects.filter(pk=island.pk).update(listed=False)
        island.listed = False
        if not move(island, IslandState.RETIRED, "retired by its owner", now=now):
            raise Conflict("this island cannot be retired now", code="state_changed")
        record(actor.organisation, actor.name, "island.retired", island.id)
    return island


def _locked(island_id: str) -> Island:
    return Island.objects.select_related("site", "gpu").select_for_update(of=("self",), no_key=True).get(pk=island_id)


def _refusal(problems: Sequence[FieldProblem]) -> InvalidInput:
    return InvalidInput("some fields are not right" if len(problems) > 1 else problems[0].message, fields=problems)


def _news(changed: dict[str, Any]) -> tuple[str, str]:
    """The kind of event and its sentence: the change a buyer would care for most."""
    if "listed" in changed:
        return ("listed", "listed again") if changed["listed"] else ("paused", "takes no new leases")
    if "price_uusd_per_gpu_hour" in changed:
        return "repriced", f"asks {format_usd(changed['price_uusd_per_gpu_hour'], 3)} per GPU-hour for new leases"
    return "changed", f"changed: {', '.join(sorted(changed)).replace('_', ' ')}"


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
