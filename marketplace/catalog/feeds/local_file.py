"""A file that somebody keeps: what a team negotiated, or what a community collects, as CSV.

Columns: provider, gpu_name, gpus, usd_per_gpu_hour; and where known vram_gib, link, region, country, pricing, stock,
resale_allowed (yes or no), seen_at (ISO 8601), source_url. An empty cell is not stated. A file with a line that cannot
be read is refused whole, by the line's number: half a list is not a list.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from marketplace.catalog.feeds import ChannelFact, FeedError, RawListing
from marketplace.catalog.normalise import decimal_or_none

CHANNEL = "local-file"
FRESHNESS_S = 24 * 3600
PRICE = "usd_per_gpu_hour"
NEEDED = ("provider", "gpu_name", "gpus", PRICE)
PRICING = {"": "on_demand", "on_demand": "on_demand", "spot": "spot_fixed", "reserved": "reserved"}


class LocalFile:
    name = CHANNEL
    channels: Sequence[ChannelFact] = (ChannelFact(CHANNEL, "This installation's own list", "broker", FRESHNESS_S, ""),)

    def __init__(self, path: Path) -> None:
        self.path = path

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise FeedError(f"cannot be read: {type(error).__name__}") from error
        return [_listing(row, number, now) for number, row in enumerate(rows, start=2)]


def _listing(row: dict[str | None, Any], number: int, now: datetime) -> RawListing:
    cells: dict[str, str] = {name: (value or "").strip() for name, value in row.items() if name}
    # A price may be left empty; a line that ends before it is a line that somebody cut.
    missing = [name for name in NEEDED if not cells.get(name) and (name != PRICE or row.get(name) is None)]
    if missing:
        raise FeedError(f"line {number}: {', '.join(missing)} is missing")
    if None in row:
        raise FeedError(f"line {number}: more cells than the header has")
    pricing, resale = cells.get("pricing", ""), cells.get("resale_allowed", "")
    if pricing not in PRICING or resale not in ("", "yes", "no"):
        raise FeedError(f"line {number}: pricing or resale_allowed says something unknown")
    try:
        gpus = int(cells["gpus"])
        seen_at = datetime.fromisoformat(cells["seen_at"]) if cells.get("seen_at") else now
    except ValueError as error:
        raise FeedError(f"line {number}: {error}") from error
    if gpus < 1:
        raise FeedError(f"line {number}: gpus must be at least 1")
    return RawListing(
        channel=CHANNEL,
        upstream=cells["provider"],
        upstream_sku="/".join([cells["provider"], cells["gpu_name"], cells.get("vram_gib", ""), cells.get("link", "")]),
        gpu_name=cells["gpu_name"],
        vram_gib=decimal_or_none(cells.get("vram_gib") or None),
        link=cells.get("link", ""),
        gpus=gpus,
        price=cells[PRICE] or None,
        price_basis="per_gpu",
        currency="USD",
        pricing_model=PRICING[pricing] if cells[PRICE] else "quote_only",
        source_url=cells.get("source_url", ""),
        observed_at=seen_at if seen_at.tzinfo else seen_at.replace(tzinfo=UTC),
        region=cells.get("region", ""),
        country=cells.get("country", ""),
        stock=cells.get("stock") or None,
        preemptible=True if pricing == "spot" else None,
        resale_allowed=resale or "unknown",
        raw=dict(cells),
    )
