"""What the rail links to: the parts of the product that exist, in the order a person meets them.

Invariant: a link is shown only when its address resolves, so the rail never promises a page that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse


@dataclass(frozen=True)
class Place:
    label: str
    address: str
    icon: str


# (label, URL name, icon in templates/components/icon.html)
_PLACES = (
    ("Market", "catalog:market", "market"),
    ("Jobs", "training:jobs", "jobs"),
    ("Leases", "trading:leases", "leases"),
    ("Islands", "fleet:islands", "islands"),
    ("Money", "billing:statement", "money"),
    ("Organisation", "accounts:organisation", "organisation"),
)


@cache
def places() -> tuple[Place, ...]:
    found = []
    for label, name, icon in _PLACES:
        try:
            found.append(Place(label, reverse(name), icon))
        except NoReverseMatch:
            continue
    return tuple(found)


def navigation(request: HttpRequest) -> dict[str, Any]:
    """A context processor: the places, and the one this page belongs to (its address begins the page's)."""
    here = max((p.address for p in places() if request.path.startswith(p.address)), key=len, default="")
    return {"places": places(), "place_here": here}
