"""Shadeform: one door to many clouds, priced in cents for the whole instance.

Invariants of the source, each with a listing in the tests: whose machine it is stands in `cloud`; a region that is not
available is listed and not there; VRAM is per card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from marketplace.catalog.feeds import ChannelFact, RawListing
from marketplace.catalog.feeds.http import MIB_PER_GIB, dollars, kept, loaded, read, unexpected
from marketplace.catalog.normalise import decimal_or_none

CHANNEL = "shadeform"
BASE_URL = "https://api.shadeform.ai"
PAGE = "https://platform.shadeform.ai"
FRESHNESS_S = 10 * 60


class ShadeformFeed:
    name = CHANNEL
    channels: Sequence[ChannelFact] = (ChannelFact(CHANNEL, "Shadeform", "broker", FRESHNESS_S, PAGE),)

    def __init__(self, key: str, base_url: str = BASE_URL) -> None:
        self._key, self.base_url = key, base_url

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        return parse(read(self.base_url, "/v1/instances/types", headers={"X-API-KEY": self._key}), now)


def parse(body: bytes, now: datetime) -> list[RawListing]:
    try:
        return [each for item in loaded(body)["instance_types"] for each in _listings(item, now)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unexpected(error) from error


def _listings(item: dict[str, Any], now: datetime) -> Iterator[RawListing]:
    shape = item["configuration"]
    ram_gib = shape.get("memory_in_gb")
    for region in item.get("availability") or []:
        yield RawListing(
            channel=CHANNEL,
            upstream=str(item["cloud"]),
            upstream_sku=f"{item['cloud']}/{item['cloud_instance_type']}",
            gpu_name=str(shape["gpu_type"]),
            vram_gib=decimal_or_none(shape.get("vram_per_gpu_in_gb")),
            link=str(shape.get("interconnect") or ""),
            gpus=int(shape["num_gpus"]),
            price=dollars(item.get("hourly_price")),
            price_basis="per_instance",
            currency="USD",
            pricing_model="on_demand",
            source_url=PAGE,
            observed_at=now,
            tier=str(item.get("deployment_type") or ""),
            region=str(region["region"]),
            vcpus=shape.get("vcpus"),
            ram_mib=None if ram_gib is None else int(ram_gib) * MIB_PER_GIB,
            stock=1 if region.get("available") else 0,
            raw=kept({**item, "availability": [region]}),
        )
