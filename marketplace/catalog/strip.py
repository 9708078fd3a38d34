"""The price strip: what one GPU costs across the list, as a picture made here.

Pure. Invariant: only stated prices are drawn; the quantiles are of the offers listed, each counted once, and the
picture says how many those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 720
LEFT, RIGHT = 8, 8
# Fewer make no distribution.
LEAST = 3


@dataclass(frozen=True)
class Strip:
    """Positions in a picture WIDTH wide, and the prices they stand for, in micro-USD per GPU-hour."""

    count: int
    low_uusd: int
    p10_uusd: int
    median_uusd: int
    p90_uusd: int
    high_uusd: int
    ticks: tuple[float, ...]
    p10_x: float
    median_x: float
    p90_x: float

    @property
    def box_width(self) -> float:
        return round(self.p90_x - self.p10_x, 1)


def strip_of(prices_uusd: Sequence[int]) -> Strip | None:
    """None when there are too few prices to speak of a distribution."""
    prices = sorted(prices_uusd)
    if len(prices) < LEAST:
        return None
    low, high = prices[0], prices[-1]
    span = max(high - low, 1)

    def x(price: float) -> float:
        return round(LEFT + (price - low) / span * (WIDTH - LEFT - RIGHT), 1)

    p10, median, p90 = (quantile(prices, share) for share in (0.10, 0.50, 0.90))
    return Strip(
        count=len(prices),
        low_uusd=low,
        p10_uusd=p10,
        median_uusd=median,
        p90_uusd=p90,
        high_uusd=high,
        ticks=tuple(x(price) for price in prices),
        p10_x=x(p10),
        median_x=x(median),
        p90_x=x(p90),
    )


def quantile(ordered: Sequence[int], share: float) -> int:
    """The nearest rank (Hyndman and Fan, 1996, definition 1): a price that somebody really asks."""
    rank = max(1, -(-len(ordered) * int(share * 100) // 100))
    return ordered[rank - 1]
