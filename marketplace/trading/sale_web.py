"""The page to sell a part of a lease, with what it would bring beside the form.

Invariant: works without scripts; the preview writes nothing; a form that is refused comes back as typed, and a form
sent twice is one order.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from marketplace.accounts.access import Action, Actor, current_actor, demand, may
from marketplace.core.clock import database_now, minute_start
from marketplace.core.errors import InvalidInput, Problem
from marketplace.core.forms import MINUTE_FORMAT, minute_field, put_on
from marketplace.core.money import PRICE_STEP_UUSD_PER_GPU_HOUR, UUSD_PER_USD, parse_usd
from marketplace.core.tickets import FIELD, Tickets
from marketplace.trading import selectors, services
from marketplace.trading.book import earliest_sale_min
from marketplace.trading.models import Lease
from marketplace.trading.models import order_id as new_order_id
from marketplace.trading.orders import MIN_BLOCK_MIN

_tickets = Tickets("trading.sale")
_FIELD_OF = {"limit_uusd_per_gpu_hour": "price", "min_block_min": "block"}


class SaleForm(forms.Form):
    gpus = forms.IntegerField(label="GPUs", min_value=1, max_value=10**6)
    price = forms.CharField(label="At least, $ per GPU-hour", max_length=20)
    start_at = minute_field(label="From, UTC", required=False, help_text="Empty: as soon as it can be another's.")
    end_at = minute_field(label="To, UTC", required=False, help_text="Empty: to the end of the lease.")
    block = forms.IntegerField(
        label="In parts of at least, minutes",
        min_value=1,
        initial=MIN_BLOCK_MIN,
        help_text="No part that is sold, or left for sale, is shorter.",
    )

    def clean_price(self) -> int:
        try:
            uusd = parse_usd(self.cleaned_data["price"], "price")
        except InvalidInput as problem:
            raise forms.ValidationError(problem.message) from problem
        return -(-uusd // PRICE_STEP_UUSD_PER_GPU_HOUR) * PRICE_STEP_UUSD_PER_GPU_HOUR  # never less than was typed

    def offer(self, lease: Lease) -> services.Offer:
        given = self.cleaned_data
        return services.Offer(
            lease_id=lease.pk,
            gpus=given["gpus"],
            limit_uusd_per_gpu_hour=given["price"],
            start_at=given["start_at"],
            end_at=given["end_at"],
            min_block_min=given["block"],
        )


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
def sell(request: HttpRequest, lease_id: str) -> HttpResponse:
    actor = current_actor(request)
    lease = selectors.reservation_for(actor.organisation, lease_id)
    if request.method == "GET":
        return _page(request, actor, lease, SaleForm(initial=_first_look(lease)))
    demand(actor, Action.WORK)
    form = SaleForm(request.POST)
    status = InvalidInput.status
    if form.is_valid():
        try:
            key = _tickets.read(request.POST.get(FIELD, ""))
            order = services.place_sale(actor, form.offer(lease), database_now(), key=key)
        except Problem as problem:
            put_on(form, problem, _FIELD_OF)
            status = problem.status
        else:
            messages.success(request, "For sale. It stays yours until somebody buys it.")
            return redirect("trading:order", order.pk)
    return _page(request, actor, lease, form, status=status)


@login_required
@never_cache
@require_POST
def preview(request: HttpRequest, lease_id: str) -> HttpResponse:
    """What the form would bring; writes nothing."""
    actor = current_actor(request)
    lease = selectors.reservation_for(actor.organisation, lease_id)
    return render(request, "trading/_sale_preview.html", _seen(actor, lease, SaleForm(request.POST)))


def _page(request: HttpRequest, actor: Actor, lease: Lease, form: SaleForm, *, status: int = 200) -> HttpResponse:
    context = {
        "form": form,
        "lease": lease,
        "ticket": _tickets.issue(new_order_id()),
        "may_order": may(actor, Action.WORK),
        **_seen(actor, lease, form),
    }
    return render(request, "trading/sell.html", context, status=status)


def _seen(actor: Actor, lease: Lease, form: SaleForm) -> dict[str, Any]:
    shown: dict[str, Any] = {"seen": None, "lease": lease}
    if not form.is_bound or not form.is_valid():
        return shown
    try:
        seen = services.preview_sale(actor, form.offer(lease), database_now())
    except Problem as problem:
        return {**shown, "refused": problem}
    order = seen.order
    return {**shown, "seen": seen, "starts": minute_start(order.start_min), "ends": minute_start(order.end_min)}


def _first_look(lease: Lease) -> dict[str, Any]:
    """All that can be sold, at what it cost."""
    now = database_now()
    first_min = max(lease.start_min, earliest_sale_min(now))
    slots = selectors.sellable_slots(lease, first_min, lease.end_min) if first_min < lease.end_min else []
    paid = lease.price_uusd_per_gpu_hour
    return {
        "gpus": (len(slots) or lease.lots) * lease.sku.gpus_per_lot,
        "price": f"{paid // UUSD_PER_USD}.{paid % UUSD_PER_USD:06d}".rstrip("0").rstrip("."),
        "end_at": minute_start(lease.end_min).strftime(MINUTE_FORMAT),
        "block": min(MIN_BLOCK_MIN, max(1, lease.end_min - first_min)),
    }
