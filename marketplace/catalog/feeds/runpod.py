"""RunPod: a cloud priced in dollars for a single card, its own and its community's.

Invariants of the source, each with a listing in the tests: a price is for one GPU whatever the pod's size; the stock is
a word, and "Low" is one at least; spot states the lowest bid that runs now, which is what one pays; what a tier does
not offer is a price of null or 0, which is no price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from marketplace.catalog.feeds import ChannelFact, RawListing
from marketplace.catalog.feeds.http import kept, loaded, read, unexpected
from marketplace.catalog.normalise import decimal_or_none

CHANNEL = "runpod"
BASE_URL = "https://api.runpod.io"
PAGE = "https://www.runpod.io/pricing"
FRESHNESS_S = 10 * 60
QUERY = (
    "query { gpuTypes { id displayName memoryInGb securePrice communityPrice secureSpotPrice communitySpotPrice"
    " lowestPrice(input: {gpuCount: 1}) { stockStatus } } }"
)
TIERS = (
    ("secure", "on_demand", "securePrice"),
    ("community", "on_demand", "communityPrice"),
    ("secure", "spot_fixed", "secureSpotPrice"),
    ("community", "spot_fixed", "communitySpotPrice"),
)


class RunpodFeed:
    name = CHANNEL
    channels: Sequence[ChannelFact] = (ChannelFact(CHANNEL, "RunPod", "broker", FRESHNESS_S, PAGE),)

    def __init__(self, key: str, base_url: str = BASE_URL) -> None:
        self._key, self.base_url = key, base_url

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        return parse(read(self.base_url, "/graphql", bearer=self._key, body={"query": QUERY}), now)


def parse(body: bytes, now: datetime) -> list[RawListing]:
    try:
        return [each for item in loaded(body)["data"]["gpuTypes"] for each in _listings(item, now)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unexpected(error) from error


def _listings(item: dict[str, Any], now: datetime) -> Iterator[RawListing]:
    for tier, pricing_model, name in TIERS:
        price = decimal_or_none(item.get(name))
        if not price:
            continue
        yield RawListing(
            channel=CHANNEL,
            upstream=CHANNEL,
            upstream_sku=str(item["id"]),
            gpu_name=str(item["id"]),
            vram_gib=decimal_or_none(item.get("memoryInGb")),
            link="",
            gpus=1,
            price=str(price),
            price_basis="per_gpu",
            currency="USD",
            pricing_model=pricing_model,
            source_url=PAGE,
            observed_at=now,
            tier=tier,
            stock=(item.get("lowestPrice") or {}).get("stockStatus"),
            preemptible=pricing_model == "spot_fixed",
            raw=kept(item),
        )
