"""GET /market: what others list, as a page.

Invariant: works without scripts; with them, the filters replace the table alone.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from marketplace.catalog import selectors
from marketplace.core.clock import database_now
from marketplace.core.money import format_usd

SPOT = {"": None, "yes": True, "no": False}


class MarketForm(forms.Form):
    gpu = forms.CharField(required=False, max_length=40, label="GPU")
    min_vram_gib = forms.IntegerField(required=False, min_value=0, max_value=100_000, label="VRAM at least, GiB")
    spot = forms.ChoiceField(required=False, choices=[("", "Any"), ("no", "On demand"), ("yes", "Spot")])
    sort = forms.ChoiceField(
        required=False, choices=[("price", "Cheapest"), ("-vram", "Most VRAM"), ("-seen", "Seen last")]
    )

    def wanted(self) -> selectors.OfferFilter:
        asked = self.cleaned_data
        return selectors.OfferFilter(
            gpu=asked["gpu"] or None,
            min_vram_gib=asked["min_vram_gib"],
            spot=SPOT[asked["spot"]],
            sort=asked["sort"] or "price",
        )


@require_safe
def market(request: HttpRequest) -> HttpResponse:
    form = MarketForm(request.GET)
    # A malformed filter shows its error and no offers: better than a list it does not describe.
    found = selectors.offers(form.wanted()) if form.is_valid() else selectors.offers(selectors.OfferFilter()).none()
    page = Paginator(found, settings.PAGE_LIMIT // 2).get_page(request.GET.get("page"))
    now = database_now()
    rows: list[dict[str, Any]] = [
        {
            "offer": offer,
            "price": None if offer.price_uusd_per_gpu_hour is None else format_usd(offer.price_uusd_per_gpu_hour, 3),
            "freshness": selectors.freshness(offer, now),
        }
        for offer in page
    ]
    query = request.GET.copy()
    query.pop("page", None)
    return render(
        request, "catalog/offers.html", {"form": form, "page": page, "rows": rows, "query": query.urlencode()}
    )
