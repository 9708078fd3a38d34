"""gpuhunt's catalogue (dstack, MPL-2.0): what the large clouds say on their price pages, collected daily by others.

Optional: it is read where the package is installed beside us (`pip install gpuhunt`) and GPUHUNT=1 is set. Invariants
of the source, each with an item in the tests: a price is a float of dollars for the whole instance; a GPU's form is
not stated; an instance without GPUs is listed, and not here. Nobody can be asked for such a price: it is a list price.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from marketplace.catalog.feeds import ChannelFact, FeedError, RawListing
from marketplace.catalog.feeds.http import MIB_PER_GIB, unexpected

CHANNEL = "gpuhunt"
PAGE = "https://github.com/dstackai/gpuhunt"
FRESHNESS_S = 24 * 3600


class HuntedFeed:
    name = CHANNEL
    channels: Sequence[ChannelFact] = (ChannelFact(CHANNEL, "gpuhunt", "list", FRESHNESS_S, PAGE),)

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        try:
            hunted = importlib.import_module("gpuhunt")
        except ImportError as error:
            raise FeedError("gpuhunt is not installed here") from error
        try:
            items = hunted.query(min_gpu_count=1)
        except Exception as error:  # theirs reads many sources, each with errors of its own
            raise FeedError(type(error).__name__) from error
        return listings_of(items, now)


def listings_of(items: Iterable[Any], now: datetime) -> list[RawListing]:
    """Its `CatalogItem`s as listings."""
    try:
        return [_listing(item, now) for item in items if item.gpu_count and item.gpu_name]
    except (AttributeError, TypeError, ValueError) as error:
        raise unexpected(error) from error


def _listing(item: Any, now: datetime) -> RawListing:
    return RawListing(
        channel=CHANNEL,
        upstream=str(item.provider),
        upstream_sku=f"{item.provider}/{item.instance_name}",
        gpu_name=str(item.gpu_name),
        vram_gib=None if item.gpu_memory is None else Decimal(str(item.gpu_memory)),
        link="",
        gpus=int(item.gpu_count),
        # The shortest text that is this float is what they read; the float itself goes no further.
        price=None if item.price is None else str(item.price),
        price_basis="per_instance",
        currency="USD",
        pricing_model="spot_fixed" if item.spot else "on_demand",
        source_url=PAGE,
        observed_at=now,
        region=str(item.location),
        vcpus=None if item.cpu is None else int(item.cpu),
        ram_mib=None if item.memory is None else int(item.memory * MIB_PER_GIB),
        preemptible=bool(item.spot),
        raw={"provider": item.provider, "instance_name": item.instance_name, "price": str(item.price)},
    )
