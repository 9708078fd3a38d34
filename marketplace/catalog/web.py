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

from marketplace.catalog import hooks, selectors
from marketplace.catalog.strip import strip_of
from marketplace.core.clock import database_now

# More prices than this in one picture are a smear.
PRICES_MAX = 2_000
SPOT = {"": None, "yes": True, "no": False}


class MarketForm(forms.Form):
    gpu = forms.CharField(
        required=False,
        max_length=40,
        label="GPU",
        widget=forms.TextInput(attrs={"list": "gpu-names", "placeholder": "any, e.g. H100"}),
    )
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

    def hides(self) -> str:
        """What these filters leave out, in words."""
        asked = self.cleaned_data
        words = []
        if asked["gpu"]:
            words.append(f"GPUs other than {asked['gpu']}")
        if asked["min_vram_gib"] is not None:
            words.append(f"less than {asked['min_vram_gib']} GiB, and VRAM not stated")
        if asked["spot"]:
            words.append("spot" if asked["spot"] == "no" else "on demand and reserved")
        return "; ".join(words)


@require_safe
def market(request: HttpRequest) -> HttpResponse:
    form = MarketForm(request.GET)
    # A malformed filter shows its error and no offers: better than a list it does not describe.
    found = selectors.offers(form.wanted()) if form.is_valid() else selectors.offers(selectors.OfferFilter()).none()
    page = Paginator(found, settings.PAGE_LIMIT // 2).get_page(request.GET.get("page"))
    now = database_now()
    rows: list[dict[str, Any]] = [{"offer": offer, "freshness": selectors.freshness(offer, now)} for offer in page]
    strip = None
    if form.is_valid() and form.cleaned_data["gpu"]:
        prices = found.order_by().values_list("price_uusd_per_gpu_hour", flat=True)[:PRICES_MAX]
        strip = strip_of([price for price in prices if price is not None])
    query = request.GET.copy()
    query.pop("page", None)
    return render(
        request,
        "catalog/offers.html",
        {
            "own_offers": hooks.own_offers(now),
            "form": form,
            "page": page,
            "rows": rows,
            "query": query.urlencode(),
            "strip": strip,
            "gpu_names": selectors.families(),
            "hidden_by": form.hides() if form.is_valid() else "",
        },
    )
