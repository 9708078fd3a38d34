"""Asks that are sold whole or not at all: which bids fill one, and what each pays.

The bids that lie inside the ask's window and together never need more lots than it has are packed so that what they
would pay at most is most; from the reserve (all of the ask at its price) upwards it is sold. Exact up to EXACT_MAX
candidates; beyond, the densest first and then swaps. Everyone pays the reserve in proportion to what they bid, to the
micro-dollar: the seller gets the reserve and no more, nobody pays above their limit. That is budget balanced and *not*
strategy-proof: who bids less pays less as long as the ask is sold.

Pure. Invariant: what is packed fits in every minute, is worth at least the reserve, and pays exactly the reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marketplace.trading.matching.orders import Ask, Bid, value_uusd

EXACT_MAX = 20
SWAP_ROUNDS = 4


@dataclass(frozen=True)
class Share:
    """What one bid pays for its part of an ask that is sold whole, for lots of one GPU."""

    bid: Bid
    pays_uusd: int


def worth_uusd(bid: Bid) -> int:
    """What the bid pays at most, for lots of one GPU."""
    return value_uusd(bid.limit_uusd_per_gpu_hour, bid.lots * (bid.end_min - bid.start_min))


def reserve_uusd(ask: Ask) -> int:
    return value_uusd(ask.price_uusd_per_gpu_hour, ask.lots * (ask.end_min - ask.start_min))


def pack(ask: Ask, bids: Sequence[Bid]) -> list[Share]:
    """The bids that fill the ask and what they pay, in order of rank; empty where no packing is worth the reserve."""
    fitting = sorted((bid for bid in bids if _fits(ask, bid)), key=lambda bid: bid.rank)
    reserve = reserve_uusd(ask)
    if sum(worth_uusd(bid) for bid in fitting) < reserve:
        return []
    chosen = _exact(ask, fitting) if len(fitting) <= EXACT_MAX else _dense(ask, fitting)
    if sum(worth_uusd(bid) for bid in chosen) < reserve:
        return []
    return _shares(chosen, reserve)


def _fits(ask: Ask, bid: Bid) -> bool:
    """Inside the ask by itself. Bids that want something the ask cannot promise stay out."""
    return (
        bid.account != ask.account
        and (bid.skus is None or ask.sku in bid.skus)
        and bid.lots <= ask.lots
        and ask.start_min <= bid.start_min
        and bid.end_min <= ask.end_min
        and bid.duration_min is None
        and bid.basket is None
    )


def _room(ask: Ask, chosen: Sequence[Bid], bid: Bid) -> bool:
    """Whether the bid fits beside those chosen. Use rises only where a bid begins, so it is enough to look there."""
    together = [each for each in chosen if each.start_min < bid.end_min and each.end_min > bid.start_min]
    moments = {bid.start_min, *(each.start_min for each in together if each.start_min > bid.start_min)}
    return all(
        sum(each.lots for each in together if each.start_min <= moment < each.end_min) + bid.lots <= ask.lots
        for moment in moments
    )


def _exact(ask: Ask, bids: Sequence[Bid]) -> list[Bid]:
    """Branch and bound over the bids by worth; of equals the packing found first."""
    ordered = sorted(bids, key=lambda bid: (-worth_uusd(bid), bid.rank))
    after = [0] * (len(ordered) + 1)
    for index in range(len(ordered) - 1, -1, -1):
        after[index] = after[index + 1] + worth_uusd(ordered[index])
    best: list[Bid] = []
    most = 0

    def branch(index: int, chosen: list[Bid], worth: int) -> None:
        nonlocal best, most
        if worth > most:
            best, most = list(chosen), worth
        if index == len(ordered) or worth + after[index] <= most:
            return
        bid = ordered[index]
        if _room(ask, chosen, bid):
            chosen.append(bid)
            branch(index + 1, chosen, worth + worth_uusd(bid))
            chosen.pop()
        branch(index + 1, chosen, worth)

    branch(0, [], 0)
    return best


def _dense(ask: Ask, bids: Sequence[Bid]) -> list[Bid]:
    """The dearest a lot-minute first; then one out for others in, as long as it gains."""
    ordered = sorted(bids, key=lambda bid: bid.rank)
    chosen: list[Bid] = []
    for bid in ordered:
        if _room(ask, chosen, bid):
            chosen.append(bid)
    for _ in range(SWAP_ROUNDS):
        swapped = _swap(ask, ordered, chosen)
        if swapped is None:
            break
        chosen = swapped
    return chosen


def _swap(ask: Ask, ordered: Sequence[Bid], chosen: list[Bid]) -> list[Bid] | None:
    before = sum(worth_uusd(bid) for bid in chosen)
    inside = {(bid.id, bid.part) for bid in chosen}
    for out in sorted(chosen, key=worth_uusd):
        kept = [bid for bid in chosen if bid is not out]
        for bid in sorted(ordered, key=lambda each: -worth_uusd(each)):
            if (bid.id, bid.part) not in inside and _room(ask, kept, bid):
                kept.append(bid)
        if sum(worth_uusd(bid) for bid in kept) > before:
            return kept
    return None


def _shares(chosen: Sequence[Bid], reserve: int) -> list[Share]:
    """Worth times reserve over the sum of worths, as cumulative floors: they add up to the reserve exactly."""
    total = sum(worth_uusd(bid) for bid in chosen)
    shares, worth, paid = [], 0, 0
    for bid in sorted(chosen, key=lambda bid: bid.rank):
        worth += worth_uusd(bid)
        upto = worth * reserve // total
        shares.append(Share(bid, upto - paid))
        paid = upto
    return shares
