"""Prime Intellect's availability: one door to many clouds.

Invariants of the source, each with a listing in the tests: a price is dollars for the whole instance, with the noise of
floats; data centre, stock and disk sizes can be null; the upstream cloud stands in `provider`. JSON numbers are read
as decimals, so no price ever passes through a float of ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import httpx

from marketplace.catalog.feeds import ChannelFact, FeedError, RawListing
from marketplace.catalog.normalise import decimal_or_none

CHANNEL = "prime-intellect"
BASE_URL = "https://api.primeintellect.ai/api/v1"
PAGE_SIZE = 100
MAX_PAGES = 50
TIMEOUT_S = 20.0
FRESHNESS_S = 10 * 60
MIB_PER_GIB = 1024


class PrimeFeed:
    """The live source, read with a key; `parse` alone is what the tests' recorded answers go through."""

    name = "prime-intellect"
    channels: Sequence[ChannelFact] = (
        ChannelFact(CHANNEL, "Prime Intellect", "broker", FRESHNESS_S, "https://app.primeintellect.ai"),
    )

    def __init__(self, key: str, base_url: str = BASE_URL) -> None:
        self._key = key
        self.base_url = base_url

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        found: list[RawListing] = []
        headers = {"Authorization": f"Bearer {self._key}"}
        with httpx.Client(base_url=self.base_url, headers=headers, timeout=TIMEOUT_S) as client:
            for page in range(1, MAX_PAGES + 1):
                try:
                    answer = client.get("/availability/gpus", params={"page": page, "page_size": PAGE_SIZE})
                    answer.raise_for_status()
                except httpx.HTTPError as error:
                    # The page's number and the kind of failure; the request (and its key) stays out of what is stored.
                    raise FeedError(f"page {page}: {type(error).__name__}") from error
                listings, total = parse(answer.content, now)
                found += listings
                if not listings or len(found) >= total:
                    return found
        raise FeedError(f"more than {MAX_PAGES} pages")


def parse(body: bytes, now: datetime) -> tuple[list[RawListing], int]:
    """The listings of one page, and how many the source says there are in all."""
    try:
        document = json.loads(body, parse_float=Decimal)
        items, total = document["items"], document["totalCount"]
        return [_listing(item, now) for item in items], int(total)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FeedError(f"not the expected shape: {type(error).__name__}: {error}") from error


def _listing(item: dict[str, Any], now: datetime) -> RawListing:
    prices = item.get("prices") or {}
    community = prices.get("onDemand") is None and prices.get("communityPrice") is not None
    price = prices.get("communityPrice") if community else prices.get("onDemand")
    spot = item.get("isSpot")
    ram_gib = decimal_or_none((item.get("memory") or {}).get("defaultCount"))
    gpus = int(item["gpuCount"])
    if gpus < 1:
        raise ValueError("gpuCount must be at least 1")
    if price is None:
        pricing_model = "quote_only"
    else:
        pricing_model = "spot_fixed" if spot else "on_demand"
    return RawListing(
        channel=CHANNEL,
        upstream=item["provider"],
        upstream_sku=f"{item['provider']}/{item['cloudId']}/{item.get('socket') or ''}",
        gpu_name=item["gpuType"],
        vram_gib=decimal_or_none(item.get("gpuMemory")),
        link=item.get("socket") or "",
        gpus=gpus,
        price=None if price is None else str(price),
        price_basis="per_instance",
        currency=prices.get("currency") or "USD",
        pricing_model=pricing_model,
        source_url="https://app.primeintellect.ai",
        observed_at=now,
        tier=item.get("security") or "",
        region=item.get("region") or "",
        data_centre=item.get("dataCenter") or "",
        country=item.get("country") or "",
        vcpus=(item.get("vcpu") or {}).get("defaultCount"),
        ram_mib=None if ram_gib is None else int(ram_gib * MIB_PER_GIB),
        stock=item.get("stockStatus"),
        preemptible=spot,
        raw=json.loads(json.dumps(item, default=str)),
    )
