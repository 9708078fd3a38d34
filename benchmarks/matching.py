"""Bids a second against a book of resting asks, and how that grows with the book.

    python benchmarks/matching.py                       the published figure: about a minute
    python benchmarks/matching.py --quick --json FILE

What is measured: `trading.matching.match` for one bid at a time against a standing book, as an order is filled when it
comes in: bids of 1 to 16 lots for windows of hours to days, half of them across windows on one island, of which about
two thirds find what they want. The book is one class of GPU on islands of eight lots with prices that differ by the
hour. No database: this is the arithmetic between reading the book and writing the fills.

The peer, in the same run: the same bids against the same book by exact windows, as a plain order book matches them (an
ask that covers the whole window, cheapest first, within the limit): one pass over the sorted asks. It finds fewer, and
how many fewer is the point of matching across windows. The figures are ratios to it, and the growth of the cost with
the book.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from marketplace.trading.matching import Ask, Bid, Colocation, Tif
from marketplace.trading.matching.clearing import Shelf
from marketplace.trading.matching.cover import cover

HOUR = 60
DAY = 24 * HOUR
HORIZON_H = 14 * 24
BOOKS = (1_000, 10_000, 20_000, 100_000)


def book(asks: int, rng: random.Random) -> list[Ask]:
    """Islands of eight lots, cut into asks of some hours, dearer by day than by night."""
    found = []
    for number in range(asks):
        start = rng.randrange(HORIZON_H)
        length = rng.choice((4, 8, 12, 24, 48))
        night = 0.7 if start % 24 >= 12 else 1.0
        found.append(
            Ask(
                id=f"ask{number}",
                account=f"seller{number % 500}",
                sku=f"island{number % max(1, asks // 8)}",
                island=f"island{number % max(1, asks // 8)}",
                lots=rng.randint(1, 8),
                start_min=start * HOUR,
                end_min=(start + length) * HOUR,
                price_uusd_per_gpu_hour=round(rng.uniform(1.0, 4.0) * night * 1_000_000 / 60) * 60,
                accepted=number,
            )
        )
    return found


def bids(count: int, rng: random.Random) -> list[Bid]:
    found = []
    for number in range(count):
        start = rng.randrange(HORIZON_H - 48)
        found.append(
            Bid(
                id=f"bid{number}",
                account=f"buyer{number}",
                lots=rng.randint(1, 16),
                start_min=start * HOUR,
                end_min=(start + rng.choice((2, 6, 12, 24, 48))) * HOUR,
                limit_uusd_per_gpu_hour=round(rng.uniform(0.6, 1.5) * 1_000_000 / 60) * 60,
                accepted=10**9 + number,
                tif=Tif.FOK,
                colocation=Colocation.ANY,
            )
        )
    return found


def by_exact_window(bid: Bid, asks: Sequence[Ask]) -> bool:
    """A plain order book: the cheapest asks that cover the whole window, at most the limit each."""
    lots = 0
    for ask in asks:
        if ask.price_uusd_per_gpu_hour > bid.limit_uusd_per_gpu_hour:
            return False
        if ask.start_min <= bid.start_min and ask.end_min >= bid.end_min:
            lots += ask.lots
            if lots >= bid.lots:
                return True
    return False


def measure(asks: int, count: int) -> dict[str, float | int]:
    rng = random.Random(1)  # the same book every time
    shelf = Shelf(book(asks, rng))
    wishes = bids(count, rng)
    took, filled, plain = [], 0, 0
    for bid in wishes:
        began = time.perf_counter()
        takes = cover(bid, shelf.offers_to(bid))
        took.append(time.perf_counter() - began)
        filled += bool(takes)
    began = time.perf_counter()
    for bid in wishes:
        plain += by_exact_window(bid, shelf.asks)
    peer_s = time.perf_counter() - began
    took.sort()
    total_s = sum(took)
    return {
        "asks": asks,
        "bids": count,
        "bids_per_s": round(count / total_s, 1),
        "p50_ms": round(took[len(took) // 2] * 1000, 3),
        "p99_ms": round(took[int(len(took) * 0.99)] * 1000, 3),
        "filled_share": round(filled / count, 3),
        "exact_window_filled_share": round(plain / count, 3),
        "ratio_to_exact_window": round(peer_s / total_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small books and few bids")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    rows = [measure(asks, 50 if options.quick else 400) for asks in (BOOKS[:2] if options.quick else BOOKS)]
    for row in rows:
        times = 1 / float(row["ratio_to_exact_window"])
        print(
            f"{row['asks']:>7,} asks: {row['bids_per_s']:>6,.0f} bids/s, p50 {row['p50_ms']:.2f} ms,"
            f" p99 {row['p99_ms']:.2f} ms; {row['filled_share']:.0%} filled,"
            f" {row['exact_window_filled_share']:.0%} by exact windows at {times:.1f} times the speed"
        )
    first, last = rows[0], rows[-1]
    exponent = math.log(float(first["bids_per_s"]) / float(last["bids_per_s"])) / math.log(last["asks"] / first["asks"])
    print(f"cost grows with the book to the power of {exponent:.2f}")
    if options.json:
        result = {"benchmark": "matching", "cores": os.cpu_count(), "books": rows, "exponent": round(exponent, 3)}
        with open(options.json, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
