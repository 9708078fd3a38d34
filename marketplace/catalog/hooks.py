"""Where the layers above show on the market page what can be booked here, above what others list.

Invariant: the catalogue imports nothing of what is above it; a provider registers a template and what it is given when
Django starts, and answers in a few queries whatever it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Provider = Callable[[datetime], dict[str, Any]]


@dataclass(frozen=True)
class OwnOffers:
    """A section of the market page: its template, given `own`."""

    template: str
    own: dict[str, Any]


_providers: dict[str, Provider] = {}


def register_own_offers(template: str, provider: Provider) -> None:
    _providers[template] = provider


def own_offers(now: datetime) -> list[OwnOffers]:
    return [OwnOffers(template, provider(now)) for template, provider in _providers.items()]
