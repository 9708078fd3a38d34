"""The pages of a seller: my islands, one island with its agent and its story, and the forms that make them.

Invariant: works without scripts; a form that is refused comes back as typed, with what is wrong at its field. A join
token is shown in the answer to its own POST and nowhere else.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from marketplace.accounts.access import Action, Actor, current_actor, may
from marketplace.catalog.models import GpuModel
from marketplace.core.clock import database_now
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.forms import minute_field, put_on
from marketplace.core.money import UUSD_PER_USD, format_usd, parse_usd
from marketplace.fleet import hooks, selectors, services
from marketplace.fleet.models import Agent, Island, IslandState
from marketplace.fleet.terms import to_price_step

EVENTS_SHOWN = 30
NEW_SITE = "new"


class TermsForm(forms.Form):
    """What an owner may change at any time."""

    price = forms.CharField(label="Price, $ per GPU-hour", max_length=20)
    available_from = minute_field(label="Offered from, UTC", required=False, help_text="Empty: now.")
    available_until = minute_field(label="Offered until, UTC", required=False, help_text="Empty: no end stated.")
    min_lease_min = forms.IntegerField(label="Shortest lease, minutes", min_value=1, initial=1)
    wan_up_mbps = forms.IntegerField(
        label="Network up, Mbit/s", required=False, min_value=1, help_text="Empty: not stated."
    )
    wan_down_mbps = forms.IntegerField(label="Network down, Mbit/s", required=False, min_value=1)
    preemptible = forms.BooleanField(label="May be taken back at any time (preemptible)", required=False)
    preempt_notice_s = forms.IntegerField(label="Notice before, seconds", required=False, min_value=0)

    def clean_price(self) -> int:
        try:
            return to_price_step(parse_usd(self.cleaned_data["price"], "price"))
        except InvalidInput as problem:
            raise forms.ValidationError(problem.message) from problem

    def terms(self, now: datetime) -> dict[str, Any]:
        given = self.cleaned_data
        names = ("available_until", "min_lease_min", "wan_up_mbps", "wan_down_mbps", "preemptible", "preempt_notice_s")
        return {
            "price_uusd_per_gpu_hour": given["price"],
            "available_from": given["available_from"] or now,
            **{name: given[name] for name in names},
        }


class IslandForm(TermsForm):
    site = forms.ChoiceField(label="Site", help_text="A place with a network of its own.")
    site_name = forms.CharField(label="Name of the new site", required=False, max_length=120)
    country = forms.CharField(
        label="Country", required=False, max_length=2, help_text="Two letters; empty: not stated."
    )
    name = forms.CharField(label="Name of the island", max_length=120)
    gpu = forms.ChoiceField(label="GPU")
    gpu_count = forms.IntegerField(label="GPUs", min_value=1)
    gpus_per_lot = forms.IntegerField(label="Rented together", min_value=1, initial=1, help_text="8 for whole nodes.")
    simulated = forms.BooleanField(label="A rehearsal: CPU threads pose as these GPUs", required=False)

    field_order = ["site", "site_name", "country", "name", "gpu", "gpu_count", "gpus_per_lot"]

    def __init__(self, *args: Any, sites: list[tuple[str, str]], gpus: list[tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["site"].choices = [*sites, (NEW_SITE, "A new site")]  # type: ignore[attr-defined]
        self.fields["gpu"].choices = gpus  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any] | None:
        given = super().clean()
        if given and given.get("site") == NEW_SITE and not given.get("site_name"):
            self.add_error("site_name", "a new site needs a name")
        return given


# Where the services' fields stand in the forms.
_FIELD_OF = {"price_uusd_per_gpu_hour": "price", "site_id": "site"}


@login_required
@never_cache
@require_safe
def islands(request: HttpRequest) -> HttpResponse:
    actor = current_actor(request)
    found = [island for island in selectors.islands_of(actor.organisation) if island.state != IslandState.RETIRED]
    agents = selectors.current_agents(found)
    rows = [{"island": island, "agent": agents.get(island.pk)} for island in found]
    return render(request, "fleet/islands.html", {"rows": rows, "may_sell": may(actor, Action.SELL)})


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
def new_island(request: HttpRequest) -> HttpResponse:
    """Site and island in one form; both or neither are made."""
    actor = current_actor(request)
    choices = {
        "sites": [(site.pk, site.name) for site in selectors.sites_of(actor.organisation)],
        "gpus": list(GpuModel.objects.order_by("family", "id").values_list("id", "name")),
    }
    if request.method == "GET":
        return render(request, "fleet/new_island.html", {"form": IslandForm(**choices)})
    form = IslandForm(request.POST, **choices)
    status = InvalidInput.status
    if form.is_valid():
        try:
            island = _register(actor, form, database_now())
        except Problem as problem:
            status = problem.status
            put_on(form, problem, _FIELD_OF)
        else:
            messages.success(request, f"{island.name} is registered. Enrol its agent, and it can be rented.")
            return redirect("fleet:island", island.pk)
    return render(request, "fleet/new_island.html", {"form": form}, status=status)


@login_required
@never_cache
@require_safe
def island(request: HttpRequest, island_id: str) -> HttpResponse:
    return _island_page(request, island_id)


@login_required
@never_cache
@require_safe
def live(request: HttpRequest, island_id: str) -> HttpResponse:
    """The parts of an island's page that move."""
    actor = current_actor(request)
    return render(request, "fleet/_live.html", _standing(selectors.island_for(actor.organisation, island_id), actor))


@login_required
@never_cache
@require_POST
def join_token(request: HttpRequest, island_id: str) -> HttpResponse:
    try:
        issued = services.issue_join_token(current_actor(request), island_id, database_now())
    except Problem as problem:
        messages.error(request, f"No token was made: {problem.message}.")
        return redirect("fleet:island", island_id)
    server = request.build_absolute_uri("/").rstrip("/")
    return _island_page(request, island_id, status=201, token=issued, server=server)


@login_required
@require_POST
def change_terms(request: HttpRequest, island_id: str) -> HttpResponse:
    actor = current_actor(request)
    selectors.island_for(actor.organisation, island_id)
    form = TermsForm(request.POST)
    status = InvalidInput.status
    if form.is_valid():
        now = database_now()
        try:
            changed = services.change_island(actor, island_id, now=now, **form.terms(now))
        except Problem as problem:
            status = problem.status
            put_on(form, problem, _FIELD_OF)
        else:
            price = format_usd(changed.price_uusd_per_gpu_hour, 2)
            messages.success(request, f"Changed: {price} a GPU-hour, for leases from now on.")
            return redirect("fleet:island", island_id)
    return _island_page(request, island_id, status=status, terms=form)


@login_required
@require_POST
def act(request: HttpRequest, island_id: str, action: str) -> HttpResponse:
    """The buttons: list and unlist, rotate, revoke, retire."""
    actor, now = current_actor(request), database_now()
    selectors.island_for(actor.organisation, island_id)
    acts = {
        "list": (lambda: services.change_island(actor, island_id, now=now, listed=True), "It takes new leases."),
        "unlist": (
            lambda: services.change_island(actor, island_id, now=now, listed=False),
            "It takes no new leases; those that run go on.",
        ),
        "rotate": (
            lambda: services.rotate_agent(actor, island_id, now),
            "The agent gets a new credential with its next call.",
        ),
        "revoke": (lambda: services.revoke_agent(actor, island_id, now), "The agent's next call is refused."),
        "retire": (lambda: services.retire_island(actor, island_id, now=now), "The island is retired."),
    }
    do, done = acts[action]
    try:
        do()
    except Problem as problem:
        messages.error(request, f"Nothing was changed: {problem.message}.")
    else:
        messages.success(request, done)
    return redirect("fleet:islands" if action == "retire" else reverse("fleet:island", args=[island_id]))


def _register(actor: Actor, form: IslandForm, now: datetime) -> Island:
    given = form.cleaned_data
    return services.register_island_at(
        actor,
        site_id=None if given["site"] == NEW_SITE else given["site"],
        site_name=given["site_name"],
        country=given["country"],
        name=given["name"],
        gpu=given["gpu"],
        gpu_count=given["gpu_count"],
        gpus_per_lot=given["gpus_per_lot"],
        simulated=given["simulated"],
        now=now,
        **form.terms(now),
    )


def _island_page(request: HttpRequest, island_id: str, *, status: int = 200, **extra: Any) -> HttpResponse:
    actor = current_actor(request)
    found = selectors.island_for(actor.organisation, island_id)
    context = {
        **_standing(found, actor),
        "terms": TermsForm(initial=_terms_of(found)),
        "may_sell": may(actor, Action.SELL) and found.state != IslandState.RETIRED,
        **extra,
    }
    return render(request, "fleet/island.html", context, status=status)


def _standing(found: Island, actor: Actor) -> dict[str, Any]:
    now = database_now()
    agent = selectors.current_agent(found)
    return {
        "island": found,
        "agent": agent,
        "gpus": _gpus(agent),
        "events": selectors.events_of(found)[:EVENTS_SHOWN],
        "sections": hooks.sections_of(found, now),
        "now": now,
    }


def _gpus(agent: Agent | None) -> list[dict[str, Any]]:
    return list(agent.facts.get("gpus", [])) if agent is not None else []


def _terms_of(found: Island) -> dict[str, Any]:
    names = ("available_from", "available_until", "min_lease_min", "wan_up_mbps", "wan_down_mbps", "preemptible")
    dollars = found.price_uusd_per_gpu_hour / UUSD_PER_USD
    return {
        **{name: getattr(found, name) for name in names},
        "preempt_notice_s": found.preempt_notice_s,
        "price": f"{dollars:.6f}".rstrip("0").rstrip("."),
    }
