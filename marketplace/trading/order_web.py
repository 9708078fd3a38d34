"""The pages of orders: the list, the form with what it would do beside it, and one order.

Invariant: works without scripts; the preview writes nothing; a form that is refused comes back as typed, with what is
wrong at its field, and a form sent twice is one order.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from marketplace.accounts.access import Action, Actor, current_actor, demand, may
from marketplace.core.clock import database_now, minute_start
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.forms import minute_field, put_on
from marketplace.core.money import PRICE_STEP_UUSD_PER_GPU_HOUR, parse_usd
from marketplace.core.tickets import FIELD, Tickets
from marketplace.trading import selectors, services
from marketplace.trading.models import Colocation, Order, OrderState, Side, Tif
from marketplace.trading.models import order_id as new_order_id
from marketplace.trading.orders import GPUS_MAX, Wanted

ORDERS_A_PAGE = 25
_tickets = Tickets("trading.order")
# Where the services' fields stand in the form.
_FIELD_OF = {"limit_uusd_per_gpu_hour": "limit", "duration_min": "hours"}


class OrderForm(forms.Form):
    gpu = forms.ChoiceField(label="GPU")
    gpus = forms.IntegerField(label="GPUs", min_value=1, max_value=GPUS_MAX, initial=1)
    start_at = minute_field(label="From, UTC", required=False, help_text="Empty: now.")
    end_at = minute_field(label="To, UTC")
    hours = forms.DecimalField(
        label="For so many hours",
        required=False,
        min_value=0,
        max_digits=8,
        decimal_places=2,
        help_text="Empty: all of the window. Else a block of it, where it is cheapest.",
    )
    limit = forms.CharField(label="At most, $ per GPU-hour", max_length=20, help_text="On average over what you get.")
    colocation = forms.ChoiceField(label="Where", choices=Colocation.choices, initial=Colocation.SAME_ISLAND)
    tif = forms.ChoiceField(label="How long it stands", choices=Tif.choices, initial=Tif.GTC)
    allow_partial_gpus = forms.BooleanField(label="Fewer GPUs will do", required=False)
    allow_partial_time = forms.BooleanField(label="Part of the time will do", required=False)

    def __init__(self, *args: Any, gpus: list[tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["gpu"].choices = gpus  # type: ignore[attr-defined]

    def clean_limit(self) -> int:
        try:
            uusd = parse_usd(self.cleaned_data["limit"], "limit")
        except InvalidInput as problem:
            raise forms.ValidationError(problem.message) from problem
        return uusd // PRICE_STEP_UUSD_PER_GPU_HOUR * PRICE_STEP_UUSD_PER_GPU_HOUR  # never more than was typed

    def wanted(self) -> Wanted:
        given = self.cleaned_data
        same = ("gpu", "gpus", "start_at", "end_at", "colocation", "tif", "allow_partial_gpus", "allow_partial_time")
        return Wanted(
            **{name: given[name] for name in same},
            limit_uusd_per_gpu_hour=given["limit"],
            duration_min=None if given["hours"] is None else int(given["hours"] * 60),
        )


@login_required
@never_cache
@require_safe
def orders(request: HttpRequest) -> HttpResponse:
    actor = current_actor(request)
    page = Paginator(selectors.orders_of(actor.organisation), ORDERS_A_PAGE).get_page(request.GET.get("page"))
    filled = selectors.filled_gpu_minutes(list(page))
    rows = [_figures(order, filled.get(order.pk, 0)) for order in page]
    live = any(row["order"].state == OrderState.OPEN for row in rows)
    return render(
        request,
        "trading/orders.html",
        {"rows": rows, "page": page, "live": live, "may_order": may(actor, Action.WORK)},
    )


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
def new_order(request: HttpRequest) -> HttpResponse:
    actor = current_actor(request)
    if request.method == "GET":
        first = {name: request.GET[name] for name in ("gpu",) if name in request.GET}
        return _form_page(request, actor, OrderForm(gpus=_gpus(), initial=first))
    demand(actor, Action.WORK)
    form = OrderForm(request.POST, gpus=_gpus())
    status = InvalidInput.status
    if form.is_valid():
        try:
            key = _tickets.read(request.POST.get(FIELD, ""))
            order = services.place_order(actor, form.wanted(), database_now(), key=key)
        except Problem as problem:
            put_on(form, problem, _FIELD_OF)
            status = problem.status
        else:
            messages.success(request, _told(order))
            return redirect("trading:order", order.pk)
    return _form_page(request, actor, form, status=status)


@login_required
@never_cache
@require_POST
def preview(request: HttpRequest) -> HttpResponse:
    """What the form would do now; writes nothing."""
    return render(
        request, "trading/_order_preview.html", _seen(current_actor(request), OrderForm(request.POST, gpus=_gpus()))
    )


class AmendForm(forms.Form):
    limit = forms.CharField(label="$ per GPU-hour", max_length=20)

    def clean_limit(self) -> int:
        try:
            uusd = parse_usd(self.cleaned_data["limit"], "limit")
        except InvalidInput as problem:
            raise forms.ValidationError(problem.message) from problem
        return uusd // PRICE_STEP_UUSD_PER_GPU_HOUR * PRICE_STEP_UUSD_PER_GPU_HOUR


@login_required
@never_cache
@require_safe
def order(request: HttpRequest, order_id: str) -> HttpResponse:
    return _order_page(request, order_id)


@login_required
@never_cache
@require_POST
def amend(request: HttpRequest, order_id: str) -> HttpResponse:
    """Another price for what is not filled: another order in its place."""
    form = AmendForm(request.POST)
    status = InvalidInput.status
    if form.is_valid():
        try:
            change = services.Change(limit_uusd_per_gpu_hour=form.cleaned_data["limit"])
            new = services.amend_order(current_actor(request), order_id, change, database_now())
        except Problem as problem:
            put_on(form, problem, _FIELD_OF)
            status = problem.status
        else:
            messages.success(request, f"Replaced. {_told(new)}")
            return redirect("trading:order", new.pk)
    return _order_page(request, order_id, amend_form=form, status=status)


def _order_page(
    request: HttpRequest, order_id: str, *, amend_form: AmendForm | None = None, status: int = 200
) -> HttpResponse:
    actor = current_actor(request)
    found = selectors.order_for(actor.organisation, order_id)
    leases = list(found.leases.select_related("island", "sku__gpu").order_by("start_min", "id"))
    filled = selectors.filled_gpu_minutes([found]).get(found.pk, 0)
    context = {
        **_figures(found, filled),
        "leases": [
            {"lease": each, "starts": minute_start(each.start_min), "ends": minute_start(each.end_min)}
            for each in leases
        ],
        "wanted": [_part(*row[:3]) for row in found.wanted],
        "offered": [_part(*row) for row in selectors.offered_parts(found)],
        "sold": [
            {**_part(each.gpus, each.start_min, each.end_min), "price_uusd_per_gpu_hour": each.price_uusd_per_gpu_hour}
            for each in found.sold.order_by("start_min", "id")
        ],
        "may_cancel": may(actor, Action.WORK) and found.state == OrderState.OPEN,
        "amend_form": amend_form or AmendForm(),
    }
    return render(request, "trading/order.html", context, status=status)


@login_required
@require_POST
def cancel(request: HttpRequest, order_id: str) -> HttpResponse:
    found = services.cancel_order(current_actor(request), order_id, database_now())
    if found.state == OrderState.CANCELLED and found.side == Side.SELL:
        messages.success(request, "Taken back. What nobody bought stays yours.")
    elif found.state == OrderState.CANCELLED:
        messages.success(request, "Cancelled. What it held is back in your cash.")
    else:
        messages.error(request, "It was filled before it could be cancelled.")
    return redirect("trading:order", order_id)


def _form_page(request: HttpRequest, actor: Actor, form: OrderForm, *, status: int = 200) -> HttpResponse:
    context = {"form": form, "ticket": _tickets.issue(new_order_id()), "may_order": may(actor, Action.WORK)}
    return render(request, "trading/new_order.html", {**context, **_seen(actor, form)}, status=status)


def _seen(actor: Actor, form: OrderForm) -> dict[str, Any]:
    """For the preview: what would be rented at once, what would stand, and what is wrong."""
    shown: dict[str, Any] = {"spendable_uusd": selectors.spendable_uusd(actor.organisation), "seen": None}
    if not form.is_bound or not form.is_valid():
        return shown
    try:
        seen = services.preview_order(actor, form.wanted(), database_now())
    except Problem as problem:
        return {**shown, "refused": problem}
    lots = [
        {
            **_part(len(lot.slots) * seen.order.gpus_per_lot, lot.start_min, lot.end_min),
            "island": seen.islands[lot.island_id],
            "price_uusd_per_gpu_hour": lot.price_uusd_per_gpu_hour,
        }
        for lot in seen.plan.lots
    ]
    rest = [_part(*row[:3]) for row in seen.plan.wanted]
    short_uusd = max(0, seen.held_uusd - seen.spendable_uusd)
    return {
        **shown,
        "seen": seen,
        "lots": lots,
        "rest": rest,
        "stands": seen.order.tif == Tif.GTC,
        "short_uusd": short_uusd,
    }


def _figures(found: Order, filled_gpu_min: int) -> dict[str, Any]:
    return {
        "order": found,
        "what": found.island.name if found.island is not None else found.gpu.name if found.gpu is not None else "",
        "starts": minute_start(found.start_min),
        "ends": minute_start(found.end_min),
        "selling": found.side == Side.SELL,
        "filled_pct": min(100, filled_gpu_min * 100 // found.asked_gpu_min),
        "held_uusd": services.most_uusd(found) if found.state == OrderState.OPEN else 0,
    }


def _part(gpus: int, start_min: int, end_min: int) -> dict[str, Any]:
    return {"gpus": gpus, "starts": minute_start(start_min), "ends": minute_start(end_min)}


def _gpus() -> list[tuple[str, str]]:
    return [(gpu.pk, gpu.name) for gpu in selectors.gpus_on_islands()]


def _told(placed: Order) -> str:
    if placed.state == OrderState.FILLED:
        return "Filled: the leases stand below."
    if placed.state == OrderState.CANCELLED:
        return f"Placed, and closed: {placed.reason}."
    if placed.side == Side.SELL:
        return "It is for sale."
    return "Placed. What is not filled stands until it can be."
