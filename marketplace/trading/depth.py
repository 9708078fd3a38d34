"""What a person sees of a book: how many GPUs at what price, for a window and hour by hour; and what is bid for.

Pure. Invariant: a GPU is counted at its cheapest price only, and for a window only where it is offered in every minute
of it; nothing is interpolated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HOUR = 60
LEVELS_MAX = 4


@dataclass(frozen=True)
class Offered:
    """`gpus` at one machine for [start_min, end_min): what an ask of the book stands for."""

    place: str  # two offers of one place are of the same GPUs
    gpus: int
    price_uusd_per_gpu_hour: int
    start_min: int
    end_min: int


@dataclass(frozen=True)
class Level:
    """`gpus` at this price, `total_gpus` at this or a better one."""

    price_uusd_per_gpu_hour: int
    gpus: int
    total_gpus: int


@dataclass(frozen=True)
class Supply:
    """For each hour from `start_min` on, the GPUs offered throughout it at or below each of `prices`."""

    start_min: int
    prices: tuple[int, ...]
    hours: tuple[tuple[int, ...], ...]

    @property
    def most(self) -> int:
        return max((row[-1] for row in self.hours if row), default=0)


def asked(offers: Iterable[Offered], start_min: int, end_min: int) -> list[Level]:
    """What could be had for the whole window, the cheapest first."""
    best = _best(offer for offer in offers if offer.start_min <= start_min and offer.end_min >= end_min)
    return _levels(best, dearest_first=False)


def bid(wanted: Iterable[tuple[int, int]]) -> list[Level]:
    """What is wanted, as (limit, GPUs), the dearest first."""
    sums: Counter[int] = Counter()
    for limit, gpus in wanted:
        sums[limit] += gpus
    return _levels(sums, dearest_first=True)


def supply(offers: Sequence[Offered], start_min: int, hours: int) -> Supply:
    """Hour by hour, at up to four prices: the cheapest, the dearest, and two between them that somebody asks."""
    prices = _ladder(sorted({offer.price_uusd_per_gpu_hour for offer in offers}))
    by_hour: list[dict[str, tuple[int, int]]] = [{} for _ in range(hours)]
    for offer in offers:
        first = max(0, -(-(offer.start_min - start_min) // HOUR))
        last = min(hours, (offer.end_min - start_min) // HOUR)
        for hour in range(first, last):
            known = by_hour[hour].get(offer.place)
            if known is None or offer.price_uusd_per_gpu_hour < known[0]:
                by_hour[hour][offer.place] = (offer.price_uusd_per_gpu_hour, offer.gpus)
    rows = tuple(
        tuple(sum(gpus for price, gpus in here.values() if price <= level) for level in prices) for here in by_hour
    )
    return Supply(start_min, prices, rows)


def _ladder(prices: Sequence[int]) -> tuple[int, ...]:
    if len(prices) <= LEVELS_MAX:
        return tuple(prices)
    last = len(prices) - 1
    return tuple(prices[last * step // (LEVELS_MAX - 1)] for step in range(LEVELS_MAX))


def _best(offers: Iterable[Offered]) -> Counter[int]:
    cheapest: dict[str, tuple[int, int]] = {}
    for offer in offers:
        known = cheapest.get(offer.place)
        if known is None or offer.price_uusd_per_gpu_hour < known[0]:
            cheapest[offer.place] = (offer.price_uusd_per_gpu_hour, offer.gpus)
    sums: Counter[int] = Counter()
    for price, gpus in cheapest.values():
        sums[price] += gpus
    return sums


def _levels(sums: Counter[int], *, dearest_first: bool) -> list[Level]:
    levels: list[Level] = []
    total = 0
    for price in sorted(sums, reverse=dearest_first):
        total += sums[price]
        levels.append(Level(price, sums[price], total))
    return levels


@dataclass(frozen=True)
class Day:
    """What was traded on one day: the average by GPU-minutes, and between what prices."""

    day: str
    average_uusd_per_gpu_hour: int
    low_uusd_per_gpu_hour: int
    high_uusd_per_gpu_hour: int
    gpu_min: int


def by_day(trades: Iterable[tuple[str, int, int]]) -> list[Day]:
    """From (day, price, GPU-minutes), in order of days."""
    days: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for day, price, gpu_min in trades:
        days[day].append((price, gpu_min))
    found = []
    for day, rows in sorted(days.items()):
        total = sum(gpu_min for _, gpu_min in rows)
        prices = [price for price, _ in rows]
        average = sum(price * gpu_min for price, gpu_min in rows) // total
        found.append(Day(day, average, min(prices), max(prices), total))
    return found
