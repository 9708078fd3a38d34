"""One batch of the market: `match(book, now_min)` says who trades with whom, at what price, and what is left.

Bids are served by (limit, accepted, id), each from the cheapest asks; then asks that are sold whole look for bids that
fill them. The price of a trade is the resting order's: an ask that stood before the bid gets its own price; one that
came after it gets the bid's limit, as far as dearer hours of the same bid leave it.

Pure and replayable: the same book gives the same outcome, whatever the order of its rows. Invariant: nobody trades with
themselves, no ask gives more than it has or leaves less than it allows, no bid pays on average above its limit, and no
ask gets less than its price.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from marketplace.trading.matching.basket import basket_cover
from marketplace.trading.matching.cover import cover, pieces_of, within
from marketplace.trading.matching.orders import (
    PRICE_STEP_UUSD,
    Ask,
    Bid,
    Colocation,
    Fill,
    Take,
    Tif,
    rest_of,
    value_uusd,
)
from marketplace.trading.matching.packing import pack


@dataclass(frozen=True)
class Book:
    """All orders that stand and those that came in with this batch: accepted from `new_from` on."""

    asks: tuple[Ask, ...] = ()
    bids: tuple[Bid, ...] = ()
    new_from: int = 0


@dataclass(frozen=True)
class Cancel:
    """An order, or what was left of it, that does not stand any longer."""

    order_id: str
    reason: str  # expired | begun | unfilled | rest | would_take | block


@dataclass(frozen=True)
class Outcome:
    fills: tuple[Fill, ...]
    cancels: tuple[Cancel, ...]
    asks: tuple[Ask, ...]
    bids: tuple[Bid, ...]


def match(book: Book, now_min: int) -> Outcome:
    """Clear the book once. What it returns as standing holds no further trade."""
    cancels: list[Cancel] = []
    shelf = Shelf(_standing_asks(book, now_min, cancels))
    waiting = sorted(_standing_bids(book, now_min, cancels), key=lambda bid: bid.rank)
    _drop_taking_asks(book, shelf, waiting, cancels)
    fills: list[Fill] = []
    left: list[Bid] = []
    for bid in waiting:
        if bid.post_only and bid.accepted >= book.new_from and _would_take(bid, shelf):
            cancels.append(Cancel(bid.id, "would_take"))
            continue
        takes = _cover(bid, shelf.offers_to(bid))
        if bid.tif is Tif.FOK and within(bid, takes) < _asked_lot_minutes(bid):
            takes = []
        if not takes:
            left.append(bid)
            continue
        fills += _priced(bid, takes)
        shelf.remove(takes)
        left += _rest(bid, takes, cancels)
    left = _sell_whole(shelf, left, fills)
    standing = []
    for bid in left:
        if bid.tif is Tif.GTC:
            standing.append(bid)
        else:
            cancels.append(Cancel(bid.id, "rest" if any(fill.bid_id == bid.id for fill in fills) else "unfilled"))
    return Outcome(tuple(fills), tuple(cancels), tuple(shelf.asks), tuple(sorted(standing, key=lambda bid: bid.rank)))


class Shelf:
    """The asks that stand, in order of rank."""

    def __init__(self, asks: Iterable[Ask]) -> None:
        self.asks = sorted(asks, key=lambda ask: ask.rank)

    def offers_to(self, bid: Bid) -> Offers:
        return Offers(self.asks, bid)

    def remove(self, takes: Sequence[Take]) -> None:
        """What was taken is gone, and the rest of each ask stands where it stood."""
        of: dict[int, list[Take]] = defaultdict(list)
        for take in takes:
            of[id(take.ask)].append(take)
        for group in of.values():
            ask = group[0].ask
            at = bisect_left(self.asks, ask.rank, key=lambda each: each.rank)
            while self.asks[at] is not ask:
                at += 1
            del self.asks[at]
            for rest in sorted(rest_of(ask, group), key=lambda each: (each.rank, each.lots)):
                at = bisect_left(self.asks, rest.rank, key=lambda each: each.rank)
                self.asks.insert(at, rest)


@dataclass(frozen=True)
class Offers:
    """The asks a bid may trade with, as often as they are asked for."""

    asks: Sequence[Ask]
    bid: Bid

    def __iter__(self) -> Iterator[Ask]:
        bid = self.bid
        for ask in self.asks:
            if (
                ask.start_min < bid.end_min
                and ask.end_min > bid.start_min
                and not ask.all_or_none
                and ask.account != bid.account
                and (bid.skus is None or ask.sku in bid.skus)
            ):
                yield ask


def _cover(bid: Bid, offers: Iterable[Ask]) -> list[Take]:
    return cover(bid, offers) if bid.basket is None else basket_cover(bid, offers, bid.basket)


# ------------------------------------------------------------------------------------------------------- what stands


def _standing_asks(book: Book, now_min: int, cancels: list[Cancel]) -> Iterator[Ask]:
    """The minutes that have passed are sold to nobody; what is left of an ask then must be worth having."""
    for ask in sorted(book.asks, key=lambda each: (each.rank, each.lots)):
        start_min = max(ask.start_min, now_min)
        if ask.expires_min is not None and ask.expires_min <= now_min:
            cancels.append(Cancel(ask.id, "expired"))
        elif ask.end_min <= start_min or (start_min > ask.start_min and ask.all_or_none):
            cancels.append(Cancel(ask.id, "begun"))
        else:
            yield replace(ask, start_min=start_min)


def _standing_bids(book: Book, now_min: int, cancels: list[Cancel]) -> Iterator[Bid]:
    for bid in book.bids:
        earliest = bid.start_min if bid.duration_min is None else max(bid.start_min, now_min)
        if bid.expires_min is not None and bid.expires_min <= now_min:
            cancels.append(Cancel(bid.id, "expired"))
        elif earliest < now_min or bid.end_min - earliest < (bid.duration_min or 1):
            cancels.append(Cancel(bid.id, "begun"))
        else:
            yield replace(bid, start_min=earliest)


def _drop_taking_asks(book: Book, shelf: Shelf, waiting: Sequence[Bid], cancels: list[Cancel]) -> None:
    """A new ask that wants to be the resting one goes where a bid that stands would have it at once."""
    for ask in [each for each in shelf.asks if each.post_only and each.accepted >= book.new_from]:
        for bid in waiting:
            if bid.accepted < ask.accepted and any(take.ask is ask for take in _cover(bid, shelf.offers_to(bid))):
                shelf.asks.remove(ask)
                cancels.append(Cancel(ask.id, "would_take"))
                break


def _would_take(bid: Bid, shelf: Shelf) -> bool:
    older = [ask for ask in shelf.offers_to(bid) if ask.accepted < bid.accepted]
    return bool(_cover(bid, older))


# -------------------------------------------------------------------------------------------------- prices and rests


def _priced(bid: Bid, takes: Sequence[Take]) -> list[Fill]:
    """Fills at the resting order's price. What a bid that stood before an ask would pay above that ask's price goes to
    the ask, less what the bid's dearer parts and slivers need to stay within its limit on average."""
    limit = bid.limit_uusd_per_gpu_hour
    gains = {
        index: limit - take.ask.price_uusd_per_gpu_hour
        for index, take in enumerate(takes)
        if take.ask.accepted > bid.accepted and take.ask.price_uusd_per_gpu_hour < limit
    }
    surplus = sum(gain * takes[index].lot_minutes for index, gain in gains.items())
    left = limit * within(bid, takes) - sum(take.cost for take in takes)
    spare = min(surplus, left)
    fills = []
    for index, take in enumerate(takes):
        more = gains.get(index, 0) * spare // surplus if surplus else 0
        price = take.ask.price_uusd_per_gpu_hour + more // PRICE_STEP_UUSD * PRICE_STEP_UUSD
        fills.append(
            Fill(
                bid_id=bid.id,
                ask_id=take.ask.id,
                buyer=bid.account,
                seller=take.ask.account,
                sku=take.ask.sku,
                island=take.ask.island,
                lots=take.lots,
                start_min=take.start_min,
                end_min=take.end_min,
                value_uusd=value_uusd(price, take.lot_minutes),
                price_uusd_per_gpu_hour=price,
            )
        )
    return fills


def _asked_lot_minutes(bid: Bid) -> int:
    return bid.lots * (bid.duration_min or bid.end_min - bid.start_min)


def _rest(bid: Bid, takes: Sequence[Take], cancels: list[Cancel]) -> list[Bid]:
    """What the bid still wants: the lots and minutes it did not get, in parts that are long enough for it, and where it
    is to be on one island, of that island. A basket, a block that was placed and a stretch on the same machines want no
    more."""
    got = within(bid, takes)
    if got >= _asked_lot_minutes(bid):
        return []
    stretch = bid.colocation is Colocation.SAME_NODES and bid.allow_partial_time
    if bid.basket is not None or bid.duration_min is not None or stretch:
        cancels.append(Cancel(bid.id, "rest"))
        return []
    wanted = []
    edges = sorted({bid.start_min, bid.end_min, *_edges(bid, takes)})
    for low, high in pairwise(edges):
        had = sum(take.lots for take in takes if take.start_min <= low and take.end_min >= high)
        if bid.lots > had:
            wanted.append((low, high, bid.lots - had))
    if bid.colocation is not Colocation.ANY:
        bid = replace(bid, skus=frozenset(take.ask.sku for take in takes))
    parts: list[Bid] = []
    block = min(bid.min_block_min, bid.end_min - bid.start_min)
    for lots, low, high in pieces_of(wanted):
        if high - low >= block:
            parts.append(replace(bid, lots=lots, start_min=low, end_min=high, part=bid.part * 64 + len(parts) + 1))
        else:
            cancels.append(Cancel(bid.id, "block"))
    return parts


def _edges(bid: Bid, takes: Sequence[Take]) -> Iterator[int]:
    for take in takes:
        for edge in (take.start_min, take.end_min):
            if bid.start_min < edge < bid.end_min:
                yield edge


# ----------------------------------------------------------------------------------------------------- all or nothing


def _sell_whole(shelf: Shelf, bids: list[Bid], fills: list[Fill]) -> list[Bid]:
    """Asks that are sold whole, the cheapest first, to the bids that are left."""
    for ask in [each for each in shelf.asks if each.all_or_none]:
        shares = pack(ask, bids)
        if not shares:
            continue
        shelf.asks.remove(ask)
        sold = {id(share.bid) for share in shares}
        bids = [bid for bid in bids if id(bid) not in sold]
        fills += [
            Fill(
                bid_id=share.bid.id,
                ask_id=ask.id,
                buyer=share.bid.account,
                seller=ask.account,
                sku=ask.sku,
                island=ask.island,
                lots=share.bid.lots,
                start_min=share.bid.start_min,
                end_min=share.bid.end_min,
                value_uusd=share.pays_uusd,
                price_uusd_per_gpu_hour=None,
            )
            for share in shares
        ]
    return bids
