"""The pages of trading: renting an island, my leases, and one lease as it runs.

Invariant: works without scripts; with them, the preview and the lease refresh in place. A form that is refused comes
back as typed, with what is wrong at its field, and a form sent twice is one lease: it carries the id of the lease it
will make, signed.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from marketplace.accounts.access import Action, current_actor, demand, may
from marketplace.billing.models import Meter
from marketplace.core.clock import database_now, minute_of, minute_start
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.forms import MINUTE_FORMAT, minute_field, put_on
from marketplace.core.money import UUSD_PER_USD, window_cost_uusd
from marketplace.core.tickets import Tickets
from marketplace.fleet.models import Island
from marketplace.trading import selectors, services
from marketplace.trading.book import earliest_sale_min
from marketplace.trading.chart import WindowChart, window_chart
from marketplace.trading.models import Contract, ContractKind, Lease, LeasePurpose, lease_id
from marketplace.trading.positions import Step
from marketplace.trading.windows import may_extend

FIRST_LOOK = timedelta(hours=1)  # what the form proposes before anybody typed
LEASES_A_PAGE = 25
ENDED_BECAUSE = {
    "window": "its window was over",
    "released": "given back",
    "cancelled": "cancelled before it began",
    "island_lost": "the island was lost",
}
_tickets = Tickets("trading.rent")


class RentForm(forms.Form):
    gpus = forms.IntegerField(label="GPUs", min_value=1, max_value=10**6)
    start_at = minute_field(label="From, UTC", required=False, help_text="Empty: now.")
    end_at = minute_field(label="To, UTC")
    # At most what the page showed is paid.
    max_price_uusd_per_gpu_hour = forms.IntegerField(
        required=False, min_value=0, max_value=1_000 * UUSD_PER_USD, widget=forms.HiddenInput
    )


class ExtendForm(forms.Form):
    end_at = minute_field(label="Until, UTC")


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
def rent(request: HttpRequest, island_id: str) -> HttpResponse:
    actor = current_actor(request)
    demand(actor, Action.VIEW)
    now = database_now()
    island = selectors.island_to_rent(island_id)
    if request.method == "POST":
        demand(actor, Action.WORK)
        form = RentForm(request.POST)
        status = InvalidInput.status
        if form.is_valid():
            try:
                asked = form.cleaned_data
                made = services.rent(
                    actor.organisation,
                    island_id=island.pk,
                    by=actor.name,
                    now=now,
                    lease_id=_tickets.read(request.POST.get("ticket", "")),
                    **asked,
                )
            except Problem as problem:
                put_on(form, problem)
                status = problem.status
            else:
                messages.success(request, f"Rented: {made.gpus} GPUs of {island.name}.")
                return redirect("trading:lease", made.pk)
        return _rent_page(request, island, form, now, status=status)
    typed = request.GET if "gpus" in request.GET else None
    return _rent_page(request, island, RentForm(typed or _first_look(island, now)), now)


@login_required
@never_cache
@require_safe
def leases(request: HttpRequest) -> HttpResponse:
    actor = current_actor(request)
    demand(actor, Action.VIEW)
    page = Paginator(selectors.leases_of(actor.organisation), LEASES_A_PAGE).get_page(request.GET.get("page"))
    meters = selectors.meters_of(page.object_list)
    rows = [_figures(each, meters[each.pk]) for each in page]
    template = "trading/_leases.html" if _wants_part(request) else "trading/leases.html"
    return render(request, template, {"page": page, "rows": rows, "live": any(row["live"] for row in rows)})


@login_required
@never_cache
@require_safe
def lease(request: HttpRequest, lease_id: str) -> HttpResponse:
    actor = current_actor(request)
    demand(actor, Action.VIEW)
    return _lease_page(request, selectors.lease_for(actor.organisation, lease_id), database_now())


@login_required
@never_cache
@require_POST
def extend(request: HttpRequest, lease_id: str) -> HttpResponse:
    actor = current_actor(request)
    demand(actor, Action.WORK)
    row = selectors.reservation_for(actor.organisation, lease_id)
    now = database_now()
    form = ExtendForm(request.POST)
    status = InvalidInput.status
    if form.is_valid():
        try:
            longer = services.extend(row.pk, end_at=form.cleaned_data["end_at"], by=actor.name, now=now)
        except Problem as problem:
            put_on(form, problem)
            status = problem.status
        else:
            until = minute_start(longer.end_min)
            messages.success(request, f"Extended until {until.day} {until:%b %Y %H:%M} UTC.")
            return redirect("trading:lease", row.pk)
    return _lease_page(request, row, now, extend_form=form, status=status)


@login_required
@never_cache
@require_POST
def end(request: HttpRequest, lease_id: str) -> HttpResponse:
    actor = current_actor(request)
    demand(actor, Action.WORK)
    row = selectors.reservation_for(actor.organisation, lease_id)
    services.end_lease(row.pk, reason="released", by=actor.name, now=database_now())
    messages.success(request, "Ended. What was not used comes back once the last counter is in, two minutes at most.")
    return redirect("trading:lease", row.pk)


def _rent_page(
    request: HttpRequest, island: Island, form: RentForm, now: datetime, *, status: int = 200
) -> HttpResponse:
    actor = current_actor(request)
    quote = None
    if form.is_valid():
        asked = form.cleaned_data
        wish = services.Wish(island.pk, asked["gpus"], asked["end_at"], asked["start_at"])
        quote = services.quote(actor.organisation, wish, now)
    context = {
        "island": island,
        "form": form,
        "quote": quote,
        "reasons": [] if quote is None else quote.reasons,
        "starts": None if quote is None or quote.window is None else minute_start(quote.window.start_min),
        "ends": None if quote is None or quote.window is None else minute_start(quote.window.end_min),
        "fee_bps": settings.MARKET_FEE_BPS,
        "free": selectors.free_now([island], minute_of(now))[island.pk],
        "ticket": _tickets.issue(lease_id()),
        "may_rent": may(actor, Action.WORK),
        "spendable_uusd": selectors.spendable_uusd(actor.organisation),
        "now": now,
    }
    return render(request, "trading/rent.html", context, status=status)


def _lease_page(
    request: HttpRequest,
    row: Lease,
    now: datetime,
    *,
    extend_form: ExtendForm | None = None,
    status: int = 200,
) -> HttpResponse:
    (meter,) = selectors.meters_of([row]).values()
    contracts = list(selectors.contracts_of(row))
    until_min = selectors.extendable_until_min(row)
    figures = _figures(row, meter)
    mine = row.purpose == LeasePurpose.RESERVE and may(current_actor(request), Action.WORK)
    proposed = {"end_at": minute_start(row.end_min) + FIRST_LOOK}
    context = {
        **figures,
        "chart": _chart(row, contracts, minute_of(now) if figures["live"] else None),
        "receipts": [_receipt(row, each) for each in contracts],
        "sales": selectors.sales_of_lease(row),
        "may_sell": figures["live"] and mine and row.end_min > earliest_sale_min(now),
        "may_end": figures["live"] and mine,
        "may_extend": figures["live"] and mine and may_extend(row, row.island) and until_min != row.end_min,
        "extendable_until": _moment(until_min),
        "extend_form": extend_form or ExtendForm(initial=proposed),
        "now": now,
    }
    template = "trading/_lease.html" if _wants_part(request) else "trading/lease.html"
    return render(request, template, context, status=status)


def _figures(row: Lease, meter: Meter) -> dict[str, Any]:
    window_gpu_ms = (row.end_min - row.start_min) * 60_000 * row.gpus
    return {
        "lease": row,
        "meter": meter,
        "starts": minute_start(row.start_min),
        "ends": minute_start(row.end_min),
        "window_gpu_ms": window_gpu_ms,
        "delivered_pct": meter.billable_gpu_ms * 100 // window_gpu_ms,
        "held_uusd": meter.escrow.balance_uusd,
        # All that ever came into the escrow was held for this lease.
        "returned_uusd": meter.escrow.credits_posted_uusd - meter.charged_uusd if row.settled_at else None,
        "live": row.state in selectors.LIVE,
        "why": ENDED_BECAUSE.get(row.end_reason, row.end_reason.replace("_", " ")),
        "settling": row.state not in selectors.LIVE and row.settled_at is None,
    }


def _chart(row: Lease, contracts: list[Contract], now_min: int | None) -> WindowChart:
    per_lot = row.gpus // row.lots
    bought: list[Step] = []
    back: list[Step] = []
    for each in contracts:
        into = back if each.kind == ContractKind.RELEASE else bought
        into.append(Step(each.start_min, each.end_min, each.lots * per_lot))
    sold = [Step(each.start_min, each.end_min, each.lots * per_lot) for each in selectors.sold_on(row)]
    return window_chart(bought, sold, back, row.start_min, row.end_min, now_min)


def _receipt(row: Lease, contract: Contract) -> dict[str, Any]:
    minutes = contract.end_min - contract.start_min
    gpus = contract.lots * (row.gpus // row.lots)
    return {
        "contract": contract,
        "starts": minute_start(contract.start_min),
        "ends": minute_start(contract.end_min),
        "gpu_minutes": minutes * gpus,
        "amount_uusd": window_cost_uusd(contract.price_uusd_per_gpu_hour, gpus, minutes),
    }


def _moment(minute: int | None) -> datetime | None:
    return None if minute is None else minute_start(minute)


def _first_look(island: Island, now: datetime) -> dict[str, Any]:
    """One lot for an hour, or for as long as the shortest lease is."""
    length = max(FIRST_LOOK, timedelta(minutes=island.min_lease_min))
    until = minute_start(minute_of(now + length))
    return {"gpus": island.gpus_per_lot, "start_at": "", "end_at": until.strftime(MINUTE_FORMAT)}


def _wants_part(request: HttpRequest) -> bool:
    return bool(getattr(request, "htmx", False))
