"""Orders in hours and dollars: what the tests say; and a slow, plain optimum to hold the fast one against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, count, pairwise, product
from typing import Any

from marketplace.trading.matching import Ask, Bid, Fill

HOUR = 60
_numbers = count(1)


def usd(dollars: float) -> int:
    return round(dollars * 1_000_000 / 60) * 60


def ask(lots: int, start_h: float, end_h: float, dollars: float, **more: Any) -> Ask:
    number = next(_numbers)
    given: dict[str, Any] = {
        "id": f"ask{number}",
        "account": f"seller{number}",
        "sku": "sku",
        "island": "island",
        "accepted": number,
        "min_block_min": 1,
    }
    terms = {"lots": lots, "start_min": int(start_h * HOUR), "end_min": int(end_h * HOUR)}
    return Ask(**{**given, **terms, "price_uusd_per_gpu_hour": usd(dollars), **more})


def bid(lots: int, start_h: float, end_h: float, dollars: float, **more: Any) -> Bid:
    number = next(_numbers)
    given: dict[str, Any] = {"id": f"bid{number}", "account": f"buyer{number}", "accepted": number, "min_block_min": 1}
    terms = {"lots": lots, "start_min": int(start_h * HOUR), "end_min": int(end_h * HOUR)}
    return Bid(**{**given, **terms, "limit_uusd_per_gpu_hour": usd(dollars), **more})


def shown(fills: Sequence[Fill]) -> list[tuple[str, int, float, float, float | None]]:
    """Who, lots, from and to in hours, price in dollars."""
    return [
        (
            fill.ask_id,
            fill.lots,
            fill.start_min / HOUR,
            fill.end_min / HOUR,
            None if fill.price_uusd_per_gpu_hour is None else round(fill.price_uusd_per_gpu_hour / 1e6, 4),
        )
        for fill in fills
    ]


# -------------------------------------------------------------------------------------------------- the plain optimum


def best_by_trying(wish: Bid, asks: Sequence[Ask]) -> tuple[int, int]:
    """(lot-minutes, cost) of the largest part of the bid that it allows within its limit, at the least cost: every way
    of choosing lots in every segment, each filled by every choice of lots on offer. A segment is a stretch in which the
    cheapest asks, as many as the bid has lots, are the same."""
    segments, stacks = _segments(wish, asks)
    prices = [[each.price_uusd_per_gpu_hour for each in stack] for stack in stacks]
    best = (0, 0)
    for lots in _allowed(wish, segments, [len(each) for each in prices]):
        size = sum(count_ * (high - low) for count_, (low, high) in zip(lots, segments, strict=True))
        cost = sum(
            min(sum(some) for some in combinations(on_offer, count_)) * (high - low)
            for count_, on_offer, (low, high) in zip(lots, prices, segments, strict=True)
        )
        if cost <= wish.limit_uusd_per_gpu_hour * size and (-size, cost) < (-best[0], best[1]):
            best = (size, cost)
    return best


def _segments(wish: Bid, asks: Sequence[Ask]) -> tuple[list[tuple[int, int]], list[list[Ask]]]:
    edges = sorted(
        {wish.start_min, wish.end_min}
        | {edge for each in asks for edge in (each.start_min, each.end_min) if wish.start_min < edge < wish.end_min}
    )
    segments: list[tuple[int, int]] = []
    stacks: list[list[Ask]] = []
    for low, high in pairwise(edges):
        there = [each for each in asks for _ in range(each.lots) if each.start_min <= low and each.end_min >= high]
        stack = sorted(there, key=lambda each: each.rank)[: wish.lots]
        if stacks and stacks[-1] == stack:
            segments[-1] = (segments[-1][0], high)
        else:
            segments.append((low, high))
            stacks.append(stack)
    return segments, stacks


def _allowed(wish: Bid, segments: list[tuple[int, int]], depth: list[int]) -> Iterator[tuple[int, ...]]:
    if wish.allow_partial_time:
        levels = range(wish.lots + 1) if wish.allow_partial_lots else (0, wish.lots)
        choices: Iterator[tuple[int, ...]] = product(*([each for each in levels if each <= have] for have in depth))
    else:
        least = 1 if wish.allow_partial_lots else wish.lots
        choices = ((each,) * len(segments) for each in range(least, wish.lots + 1) if each <= min(depth, default=0))
    block = min(wish.min_block_min, wish.end_min - wish.start_min)
    for lots in choices:
        if all(_long_enough(lots, level, segments, block) for level in range(1, wish.lots + 1)):
            yield lots


def _long_enough(lots: tuple[int, ...], level: int, segments: list[tuple[int, int]], block: int) -> bool:
    run = 0
    for count_, (low, high) in zip((*lots, 0), (*segments, (0, 0)), strict=True):
        if count_ >= level:
            run += high - low
        elif 0 < run < block:
            return False
        else:
            run = 0
    return True
