"""List prices as their providers published them on a day: history to compare with, never to book.

Invariant: the rows are read from the product's own files, each with the provider's page and the day it was seen; the
day is the observation, whenever the file is loaded.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from marketplace.catalog.feeds import ChannelFact, RawListing
from marketplace.catalog.normalise import decimal_or_none

DATA = Path(__file__).resolve().parent.parent / "data"
FRESHNESS_S = 24 * 3600
MIB_PER_GIB = 1024
PRICING_MODELS = {"on_demand": "on_demand", "spot": "spot_fixed"}


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


class ListPrices:
    """The list prices that come with the product."""

    name = "list-prices"

    def __init__(self, folder: Path = DATA) -> None:
        self.folder = folder
        self.channels: Sequence[ChannelFact] = [
            ChannelFact(row["slug"], row["name"], "list", FRESHNESS_S, row["source_page"])
            for row in rows_of(folder / "channels.csv")
        ]

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        return [_listing(row) for row in rows_of(self.folder / "list_prices.csv")]


def _listing(row: dict[str, str]) -> RawListing:
    ram_gib = decimal_or_none(row["ram_gib"])
    # A page has no product codes: what distinguishes its lines is the code.
    sku = [row[column] for column in ("gpu_name", "vram", "link", "vcpus", "ram_gib")]
    return RawListing(
        channel=row["channel"],
        upstream=row["channel"],
        upstream_sku="/".join(sku),
        gpu_name=row["gpu_name"],
        vram_gib=decimal_or_none(row["vram"]),
        link=row["link"],
        gpus=1,
        price=row["usd_per_gpu_hour"] or None,
        price_basis="per_gpu",
        currency="USD",
        pricing_model=PRICING_MODELS[row["pricing"]],
        source_url=row["source_page"],
        observed_at=datetime.fromisoformat(row["seen_on"]).replace(tzinfo=UTC),
        tier=row["tier"],
        vcpus=int(row["vcpus"]) if row["vcpus"] else None,
        ram_mib=int(ram_gib * MIB_PER_GIB) if ram_gib is not None else None,
        preemptible=True if row["pricing"] == "spot" else None,
        raw=dict(row),
    )
