"""The operators' page of the catalogue: which feeds were read, and which listings are kept from everybody.

Invariant: to whoever is no operator it is not there.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from marketplace.accounts.operators import operators_only
from marketplace.catalog import desk


@operators_only
@require_safe
def quarantine(request: HttpRequest) -> HttpResponse:
    reasons = desk.reasons()
    asked = request.GET.get("reason", "")
    # A reason that no longer stands shows all: the list is never empty for an address that was kept.
    chosen = asked if asked in {reason.code for reason in reasons} else ""
    page = Paginator(desk.quarantined(chosen), settings.PAGE_LIMIT // 2).get_page(request.GET.get("page"))
    rows: list[dict[str, Any]] = [
        {"offer": offer, "why": desk.WORDS.get(offer.quarantine_reason, offer.quarantine_reason)} for offer in page
    ]
    context = {
        "runs": desk.last_runs(),
        "reasons": reasons,
        "chosen": chosen,
        "total": sum(reason.offers for reason in reasons),
        "page": page,
        "rows": rows,
        "query": f"reason={chosen}" if chosen else "",
    }
    return render(request, "catalog/quarantine.html", context)
