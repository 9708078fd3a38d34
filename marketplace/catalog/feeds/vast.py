"""Vast.ai: peers who list the same machine several times, whole and in slices.

Invariants of the source, each with a listing in the tests: a price is dollars for the whole offer; RAM is in MB, VRAM
per card in MB; an offer of one card and one of eight may be the same cards, which `machine_id` tells, and then they are
one group; interruptible offers state a minimum bid, which is a floor and no price.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from marketplace.catalog.feeds import ChannelFact, RawListing
from marketplace.catalog.feeds.http import MIB_PER_GIB, kept, loaded, read, unexpected

CHANNEL = "vast"
BASE_URL = "https://console.vast.ai"
PAGE = "https://cloud.vast.ai"
FRESHNESS_S = 5 * 60
VRAM_PLACES = Decimal("0.1")


class VastFeed:
    name = CHANNEL
    channels: Sequence[ChannelFact] = (ChannelFact(CHANNEL, "Vast.ai", "peer", FRESHNESS_S, PAGE),)

    def __init__(self, key: str, base_url: str = BASE_URL) -> None:
        self._key, self.base_url = key, base_url

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        return parse(read(self.base_url, "/api/v0/bundles/", bearer=self._key), now)


def parse(body: bytes, now: datetime) -> list[RawListing]:
    try:
        return [_listing(item, now) for item in loaded(body)["offers"] if item.get("rentable", True)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unexpected(error) from error


def _listing(item: dict[str, Any], now: datetime) -> RawListing:
    bid = bool(item.get("is_bid"))
    price = item.get("dph_total")
    place, _, country = str(item.get("geolocation") or "").rpartition(", ")
    vram_mb, ram_mb = item.get("gpu_ram"), item.get("cpu_ram")
    return RawListing(
        channel=CHANNEL,
        upstream=CHANNEL,
        upstream_sku=f"machine-{item['machine_id']}",
        gpu_name=str(item["gpu_name"]),
        vram_gib=None if vram_mb is None else (Decimal(vram_mb) / MIB_PER_GIB).quantize(VRAM_PLACES),
        link="",
        gpus=int(item["num_gpus"]),
        # A minimum bid is where bidding begins; what one pays nobody knows before.
        price=None if bid or price is None else str(price),
        price_basis="per_instance",
        currency="USD",
        pricing_model="spot_bid" if bid else "on_demand",
        source_url=PAGE,
        observed_at=now,
        tier=str(item.get("verification") or ""),
        region=place,
        country=country if len(country) == 2 else "",
        vcpus=None if item.get("cpu_cores_effective") is None else int(item["cpu_cores_effective"]),
        ram_mib=None if ram_mb is None else int(ram_mb),
        stock=1,
        preemptible=bid,
        machine=str(item["machine_id"]),
        raw=kept(item),
    )
