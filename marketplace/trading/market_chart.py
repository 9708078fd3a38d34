"""The pictures of a class's market in SVG coordinates: supply by hour, depth by price, price by day.

Pure. Invariant: integers in, integers out; steps are drawn as steps, and what cannot be seen is said in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marketplace.trading.depth import Level, Supply

# Of one day: low, middle, high.
Prices = tuple[int, int, int]

WIDTH, HEIGHT, HEADROOM = 1_000, 200, 8


@dataclass(frozen=True)
class Band:
    """One price level of the supply, on top of the cheaper ones."""

    number: int
    price_uusd_per_gpu_hour: int
    path: str


@dataclass(frozen=True)
class DepthPicture:
    asks: str
    bids: str
    low_uusd: int
    high_uusd: int
    most: int


@dataclass(frozen=True)
class PricePicture:
    band: str
    line: str
    low_uusd: int
    high_uusd: int


def supply_bands(of: Supply) -> list[Band]:
    if not of.hours or not of.most:
        return []
    width = len(of.hours)

    def y(gpus: int) -> int:
        return HEIGHT - gpus * (HEIGHT - HEADROOM) // of.most

    bands = []
    for number, price in enumerate(of.prices):
        top = [row[number] for row in of.hours]
        below = [row[number - 1] if number else 0 for row in of.hours]
        there = "".join(f"L{i * WIDTH // width} {y(n)}L{(i + 1) * WIDTH // width} {y(n)}" for i, n in enumerate(top))
        back = "".join(
            f"L{(i + 1) * WIDTH // width} {y(n)}L{i * WIDTH // width} {y(n)}"
            for i, n in reversed(list(enumerate(below)))
        )
        bands.append(Band(number, price, f"M0 {y(below[0])}{there}{back}Z"))
    return bands


def depth_picture(asks: Sequence[Level], bids: Sequence[Level]) -> DepthPicture | None:
    """Cumulative GPUs over the price; asks grow to the right, bids to the left. None where there is neither."""
    prices = [level.price_uusd_per_gpu_hour for level in (*asks, *bids)]
    if not prices:
        return None
    low, high = min(prices), max(prices)
    margin = max((high - low) // 10, high // 20, 1)
    low, high = max(0, low - margin), high + margin
    most = max(level.total_gpus for level in (*asks, *bids))

    def x(price: int) -> int:
        return (price - low) * WIDTH // (high - low)

    def y(gpus: int) -> int:
        return HEIGHT - gpus * (HEIGHT - HEADROOM) // most

    def steps(levels: Sequence[Level], edge: int) -> str:
        if not levels:
            return ""
        path = f"M{x(levels[0].price_uusd_per_gpu_hour)} {HEIGHT}"
        for level in levels:
            path += f"H{x(level.price_uusd_per_gpu_hour)}V{y(level.total_gpus)}"
        return f"{path}H{edge}V{HEIGHT}Z"

    return DepthPicture(steps(asks, WIDTH), steps(bids, 0), low, high, most)


def price_picture(days: Sequence[Prices]) -> PricePicture | None:
    """A line over the days within a band, from (low, middle, high) of each. None below two days."""
    if len(days) < 2:
        return None
    low, high = min(low for low, _, _ in days), max(high for _, _, high in days)
    span = max(high - low, 1)
    xs = [number * WIDTH // (len(days) - 1) for number in range(len(days))]

    def y(price: int) -> int:
        return HEIGHT - HEADROOM - (price - low) * (HEIGHT - 2 * HEADROOM) // span

    line = "M" + "L".join(f"{x} {y(middle)}" for x, (_, middle, _) in zip(xs, days, strict=True))
    tops = [f"{x} {y(most)}" for x, (_, _, most) in zip(xs, days, strict=True)]
    bottoms = [f"{x} {y(least)}" for x, (least, _, _) in zip(xs, days, strict=True)]
    return PricePicture("M" + "L".join([*tops, *reversed(bottoms)]) + "Z", line, low, high)


def midnights(hours: int, start_min: int) -> list[int]:
    """Where the UTC days begin in a picture of so many hours."""
    return [hour * WIDTH // hours for hour in range(1, hours) if (start_min + hour * 60) % (24 * 60) == 0]
