"""One bid over several islands: its quorum within the average limit or nothing, and beyond it what the limit bears.

Each chosen island gives the same lots throughout the window, and not fewer than the bid wants of an island. What an
island's lots cost rises with their number, so the best choice of every size follows from those of fewer islands.

Pure. Invariant: all or none below the quorum; the average of all of it is at most the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from marketplace.trading.matching.cover import costs_by_lot, leaving_no_sliver, stacked, takes_of
from marketplace.trading.matching.orders import Ask, Basket, Bid, Take

# More lots than this are chosen in steps: the table of choices grows with the square of their number.
TABLE_MAX = 256


def basket_cover(bid: Bid, asks: Iterable[Ask], basket: Basket) -> list[Take]:
    """What the bid takes, by island; empty where its quorum cannot be had within its limit."""
    return leaving_no_sliver(bid, asks, lambda wish, usable: _chosen(wish, list(usable), basket))


def _chosen(bid: Bid, asks: list[Ask], basket: Basket) -> list[Take]:
    islands = {}
    for island in sorted({ask.island for ask in asks}):
        segments = stacked(bid, (ask for ask in asks if ask.island == island), alone=False)
        totals = [0, *accumulate(costs_by_lot(segments))]
        if len(totals) > basket.min_lots_per_island:
            islands[island] = (segments, totals)
    step = max(1, -(-bid.lots // TABLE_MAX))
    best: dict[int, tuple[int, tuple[tuple[str, int], ...]]] = {0: (0, ())}
    for island, (_, totals) in islands.items():
        counts = [
            count
            for count in range(basket.min_lots_per_island, len(totals))
            if (count - basket.min_lots_per_island) % step == 0 or count == len(totals) - 1
        ]
        grown = dict(best)
        for lots, (cost, chosen) in best.items():
            for count in counts:
                together, dearer = lots + count, cost + totals[count]
                if together > bid.lots:
                    break
                if together not in grown or dearer < grown[together][0]:
                    grown[together] = (dearer, (*chosen, (island, count)))
        best = grown
    minutes = bid.end_min - bid.start_min
    within = [
        lots
        for lots, (cost, _) in best.items()
        if lots >= basket.quorum_lots and cost <= bid.limit_uusd_per_gpu_hour * minutes * lots
    ]
    if not within:
        return []
    takes = []
    for island, count in best[max(within)][1]:
        segments = islands[island][0]
        takes += takes_of(segments, [count] * len(segments))
    return takes
