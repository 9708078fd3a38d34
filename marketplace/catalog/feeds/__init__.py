"""What the catalogue wants of a source of listings, and nothing of any one source.

Invariant: a feed reads and translates; it neither stores nor judges. It states the basis of every price it gives, and
keeps what it was given in `raw`. A source that cannot be read raises `FeedError`: it never returns half an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol


class FeedError(Exception):
    """The source did not answer, or with something that is not what it promises."""


@dataclass(frozen=True)
class ChannelFact:
    """A door a feed reports on."""

    slug: str
    name: str
    kind: str
    freshness_s: int
    source_url: str


@dataclass(frozen=True)
class RawListing:
    """One listing as its source states it. None and "" mean: not stated."""

    channel: str
    upstream: str
    upstream_sku: str
    gpu_name: str
    vram_gib: Decimal | None
    link: str
    gpus: int
    price: str | None
    price_basis: str
    currency: str
    pricing_model: str
    source_url: str
    observed_at: datetime
    tier: str = ""
    region: str = ""
    data_centre: str = ""
    country: str = ""
    vcpus: int | None = None
    ram_mib: int | None = None
    stock: str | int | None = None
    preemptible: bool | None = None
    resale_allowed: str = "unknown"  # yes | no | unknown
    # Where a source tells: listings of one machine are of the same cards, however it is cut.
    machine: str = ""
    raw: dict[str, Any] = field(default_factory=dict)


class Feed(Protocol):
    """A source of listings. `fetch` may take its time: it is called outside of every transaction."""

    name: str
    channels: Sequence[ChannelFact]

    def fetch(self, now: datetime) -> Sequence[RawListing]: ...
