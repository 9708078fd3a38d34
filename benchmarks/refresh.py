"""A refresh of a catalogue of 100,000 offers: all new, nothing new, and a tenth repriced.

    python benchmarks/refresh.py                          the published figure: about two minutes on two cores
    python benchmarks/refresh.py --offers 5000 --json FILE

What is measured: `catalog.services.refresh` of one feed that lists `--offers` machines: normalising names, screening
against the 30-day medians, grouping, one row a change of price, withdrawing what is gone; one transaction. The fetch
itself is left out. The embedded PostgreSQL has its safety on.

The bound, in the same run: PostgreSQL alone copies as many finished rows into a table with the same columns and indexes
(`COPY`, one transaction). The figure is the ratio.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.servers import reachable_folder

if TYPE_CHECKING:
    from marketplace.catalog.feeds import ChannelFact, RawListing

GPUS = (("H100 SXM", 80, "SXM", 2.4), ("A100-SXM4-80GB", 80, "SXM", 1.3), ("RTX 4090", 24, "PCIe", 0.4))
REGIONS = ("eu-north", "eu-west", "us-east", "us-west", "ap-south")


@dataclass
class Given:
    """A feed whose listings are there already."""

    channels: Sequence[ChannelFact]
    listings: list[RawListing]
    name: str = "bench"

    def fetch(self, now: datetime) -> Sequence[RawListing]:
        return [replace(each, observed_at=now) for each in self.listings]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offers", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    with reachable_folder() as folder, Stack(StateDir(folder), web_port=0, celery=False) as stack:
        os.environ.update(stack.env)
        import django

        django.setup()
        result = measure(options.offers)
    print(
        f"{result['offers']:,} offers, {result['cores']} cores: all new {result['new_s']:.1f} s, "
        f"nothing new {result['same_s']:.1f} s, a tenth repriced {result['repriced_s']:.1f} s\n"
        f"PostgreSQL alone copies them in {result['copy_s']:.1f} s (ratio {result['ratio_to_copy']})"
    )
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(result) + "\n")


def measure(offers: int) -> dict[str, Any]:
    from django.core.management import call_command
    from django.db import connection

    from marketplace.catalog.feeds import ChannelFact
    from marketplace.catalog.models import Offer, PriceChange
    from marketplace.catalog.services import refresh
    from marketplace.core.clock import database_now

    call_command("load_catalogue", stdout=io.StringIO())
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0")
    rng = random.Random(1)
    now = database_now()
    channels = [ChannelFact("bench", "Bench", "peer", 300, "https://example.org")]
    feed = Given(channels, [listing(number, rng, now) for number in range(offers)])
    took = {}
    for name, minutes in (("new", 0), ("same", 5), ("repriced", 10)):
        if name == "repriced":
            feed.listings = [
                replace(each, price=f"{float(each.price or 0) * 1.01:.4f}") if number % 10 == 0 else each
                for number, each in enumerate(feed.listings)
            ]
        began = time.perf_counter()
        run = refresh(feed, now + timedelta(minutes=minutes))
        took[name] = time.perf_counter() - began
        expected = {"new": (offers, 0), "same": (0, 0), "repriced": (0, -(-offers // 10))}[name]
        if (run.created, run.repriced) != expected:
            raise SystemExit(f"{name}: {run.created} created and {run.repriced} repriced, not {expected}")
    if PriceChange.objects.filter(offer__channel="bench").count() != offers + -(-offers // 10):
        raise SystemExit("not one row a change of price")
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE bound_offer (LIKE catalog_offer INCLUDING DEFAULTS INCLUDING INDEXES)")
        with cursor.copy("COPY (SELECT * FROM catalog_offer WHERE channel_id = 'bench') TO STDOUT") as out:
            rows = b"".join(bytes(block) for block in out)
        began = time.perf_counter()
        with cursor.copy("COPY bound_offer FROM STDIN") as into:
            into.write(rows)
        copy_s = time.perf_counter() - began
    return {
        "benchmark": "refresh",
        "offers": Offer.objects.filter(channel="bench").count(),
        "quarantined": Offer.objects.filter(channel="bench").exclude(quarantine_reason="").count(),
        "cores": os.cpu_count(),
        "new_s": round(took["new"], 2),
        "same_s": round(took["same"], 2),
        "repriced_s": round(took["repriced"], 2),
        "copy_s": round(copy_s, 2),
        "ratio_to_copy": round(copy_s / took["new"], 3),
    }


def listing(number: int, rng: random.Random, now: datetime) -> RawListing:
    from marketplace.catalog.feeds import RawListing

    name, vram_gib, link, price = rng.choice(GPUS)
    return RawListing(
        channel="bench",
        upstream=f"host {number % 900}",
        upstream_sku=f"machine-{number}",
        gpu_name=name,
        vram_gib=Decimal(vram_gib),
        link=link,
        gpus=rng.choice((1, 2, 4, 8)),
        price=f"{price * rng.uniform(0.7, 1.5):.4f}",
        price_basis="per_gpu",
        currency="USD",
        pricing_model=rng.choice(("on_demand", "on_demand", "spot_fixed")),
        source_url="https://example.org",
        observed_at=now,
        region=rng.choice(REGIONS),
        machine=f"machine-{number}",
        raw={"id": number, "note": "as the source says it"},
    )


if __name__ == "__main__":
    main()
