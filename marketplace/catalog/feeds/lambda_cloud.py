"""Lambda: a cloud of its own machines, priced in cents for the whole instance.

Invariants of the source, each with a listing in the tests: a type without capacity anywhere is listed and not there;
the GPU's name holds its VRAM and socket ("H100 (80 GB SXM5)"); each region with capacity is an offer of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from marketplace.catalog.feeds import ChannelFact, RawListing
from marketplace.catalog.feeds.http import MIB_PER_GIB, dollars, kept, loaded, read, unexpected

CHANNEL = "lambda-cloud"
BASE_URL = "https://cloud.lambda.ai"
PAGE = "https://lambda.ai/instances"
FRESHNESS_S = 10 * 60
GPU = re.compile(r"^(?P<name>.+?)\s*\((?P<vram>\d+)\s*GB\s*(?P<link>\w+)?\)$")


class LambdaFeed:
    name = CHANNEL
    channels: Sequence[ChannelFact] = (ChannelFact(CHANNEL, "Lambda", "broker", FRESHNESS_S, PAGE),)

    def __init__(self, key: str, base_url: str = BASE_URL) -> None:
        self._key, self.base_url = key, base_url

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        return parse(read(self.base_url, "/api/v1/instance-types", bearer=self._key), now)


def parse(body: bytes, now: datetime) -> list[RawListing]:
    try:
        return [each for item in loaded(body)["data"].values() for each in _listings(item, now)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unexpected(error) from error


def _listings(item: dict[str, Any], now: datetime) -> Iterator[RawListing]:
    kind = item["instance_type"]
    specs = kind["specs"]
    told = GPU.match(str(kind["gpu_description"]))
    there = item.get("regions_with_capacity_available") or []
    for region in there or [{"name": ""}]:
        yield RawListing(
            channel=CHANNEL,
            upstream="lambda",
            upstream_sku=str(kind["name"]),
            gpu_name=told["name"] if told else str(kind["gpu_description"]),
            vram_gib=Decimal(told["vram"]) if told else None,
            link=(told["link"] or "") if told else "",
            gpus=int(specs["gpus"]),
            price=dollars(kind.get("price_cents_per_hour")),
            price_basis="per_instance",
            currency="USD",
            pricing_model="on_demand",
            source_url=PAGE,
            observed_at=now,
            region=str(region["name"]),
            vcpus=specs.get("vcpus"),
            ram_mib=None if specs.get("memory_gib") is None else int(specs["memory_gib"]) * MIB_PER_GIB,
            stock=1 if there else 0,
            preemptible=False,
            raw=kept({**item, "region": region}),
        )
