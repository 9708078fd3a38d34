"""What the rail links to: the parts of the product that exist, in the order a person meets them.

Invariant: a link is shown only when its address resolves, so the rail never promises a page that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse

from marketplace.accounts.operators import is_operator


@dataclass(frozen=True)
class Place:
    label: str
    address: str
    icon: str
    also: tuple[str, ...] = ()  # addresses below which a page belongs to it too
    for_operators: bool = False


# (label, URL name, icon in templates/components/icon.html, what else belongs to it)
_PLACES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("Market", "catalog:market", "market", ()),
    ("Jobs", "training:jobs", "jobs", ()),
    ("Leases", "trading:leases", "leases", ("/orders",)),
    ("Islands", "fleet:islands", "islands", ()),
    ("Money", "billing:statement", "money", ()),
    ("Organisation", "accounts:organisation", "organisation", ()),
)
# The desk of those who run the market: its first page, and all below.
_DESK = ("Desk", "catalog:quarantine", "desk", ("/desk",))


@cache
def places() -> tuple[Place, ...]:
    found = []
    for label, name, icon, also in (*_PLACES, _DESK):
        try:
            found.append(Place(label, reverse(name), icon, also, for_operators=label == "Desk"))
        except NoReverseMatch:
            continue
    return tuple(found)


def navigation(request: HttpRequest) -> dict[str, Any]:
    """A context processor: the places, and the one this page belongs to (its address begins the page's)."""
    shown = [place for place in places() if is_operator(request) or not place.for_operators]
    fits = [(len(each), p.address) for p in shown for each in (p.address, *p.also) if request.path.startswith(each)]
    here = max(fits, default=(0, ""))[1]
    return {"places": shown, "place_here": here}
