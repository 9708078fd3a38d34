"""Hyperstack: a cloud that tells its stock by region, and its prices in a book apart.

Invariants of the source, each with a listing in the tests: the price book is a bare array of dollars for a single card;
stock is "200+" for two hundred at least; a model without a price is there and has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from marketplace.catalog.feeds import ChannelFact, RawListing
from marketplace.catalog.feeds.http import kept, loaded, read, unexpected
from marketplace.catalog.normalise import decimal_or_none

CHANNEL = "hyperstack"
BASE_URL = "https://infrahub-api.nexgencloud.com"
PAGE = "https://www.hyperstack.cloud/gpu-pricing"
FRESHNESS_S = 10 * 60
GIB_OF_NAME = "G-"  # "H100-80G-PCIe"


class HyperstackFeed:
    name = CHANNEL
    channels: Sequence[ChannelFact] = (ChannelFact(CHANNEL, "Hyperstack", "broker", FRESHNESS_S, PAGE),)

    def __init__(self, key: str, base_url: str = BASE_URL) -> None:
        self._key, self.base_url = key, base_url

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        headers = {"api_key": self._key}
        stock = read(self.base_url, "/v1/core/stocks", headers=headers)
        return parse(stock, read(self.base_url, "/v1/pricebook", headers=headers), now)


def parse(stock: bytes, prices: bytes, now: datetime) -> list[RawListing]:
    try:
        book = {str(row["name"]): row for row in loaded(prices)}
        return [each for region in loaded(stock)["stocks"] for each in _listings(region, book, now)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unexpected(error) from error


def _listings(region: dict[str, Any], book: dict[str, Any], now: datetime) -> Iterator[RawListing]:
    for model in region["models"]:
        name = str(model["model"])
        vram = name.partition(GIB_OF_NAME)[0].rpartition("-")[2]
        priced = book.get(name)
        price = None if priced is None else priced.get("value")
        yield RawListing(
            channel=CHANNEL,
            upstream=CHANNEL,
            upstream_sku=name,
            gpu_name=name,
            vram_gib=decimal_or_none(vram),
            link="",
            gpus=1,
            price=None if price is None else str(price),
            price_basis="per_gpu",
            currency="USD",
            pricing_model="quote_only" if price is None else "on_demand",
            source_url=PAGE,
            observed_at=now,
            region=str(region["region"]),
            stock=model.get("available"),
            raw=kept({**model, "price": priced}),
        )
