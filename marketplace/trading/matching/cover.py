"""The cheapest cover of one bid by the asks of a book.

The bid's window is cut at the edges of the asks inside it. Segments are independent, so taking asks in each by (price,
accepted, id) is the cheapest cover of any depth; whether it is accepted depends on the *average* alone, so that cheap
hours may carry a dear one. What may be left out is the bid's to say, and the largest part that it allows within its
limit is taken, at the least cost. (Where both lots and time may be left out and a part has to be of some length, lots
are fitted one after another: good, and not always the largest.)

Pure. Invariant: what is returned lies inside the bid's window (but for slivers it pays for), takes from no ask more
than it has in any minute, costs on average at most the limit, and is the same for the same book.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from marketplace.trading.matching.orders import Ask, Bid, Colocation, Take, slivers_of

# Beyond these the largest allowed part is good and no longer proven best: it has to be found between two orders.
FRONT_MAX = 256
STARTS_MAX = 24 * 31
SLIVER_TRIES = 16
GRID_MIN = 60


@dataclass
class Segment:
    """A piece of the window in which the same asks are for sale: `takes` in order of price, `depth` lots in all."""

    start_min: int
    end_min: int
    takes: list[tuple[Ask, int]] = field(default_factory=list)
    depth: int = 0

    @property
    def minutes(self) -> int:
        return self.end_min - self.start_min


@dataclass(frozen=True)
class Choice:
    """A part of a bid: for each segment how many lots; `excess` is its cost above the limit (below zero: beneath)."""

    lot_minutes: int
    excess: int
    lots: tuple[int, ...]


def cover(bid: Bid, asks: Iterable[Ask]) -> list[Take]:
    """What the bid takes of these asks, by time; empty where nothing that it allows is within its limit.

    `asks` are those it may trade with, in order of rank; they are gone through more than once."""
    if bid.duration_min is not None:
        return _cheapest_start(bid, asks, bid.duration_min)
    if bid.colocation is Colocation.ANY:
        return _without_slivers(bid, asks)
    best: list[Take] = []
    for island in sorted({ask.island for ask in asks}):
        there = [ask for ask in asks if ask.island == island]
        found = _same_nodes(bid, there) if bid.colocation is Colocation.SAME_NODES else _without_slivers(bid, there)
        if _better(bid, found, best):
            best = found
    return best


def stacked(bid: Bid, asks: Iterable[Ask], *, alone: bool = True) -> list[Segment]:
    """The bid's window in segments, each with its cheapest asks up to its lots. One pass in order of price, that ends
    when all is there, or, where these asks are `alone` to fill the bid, when not a minute more could be carried by what
    is cheaper than the limit."""
    limit = bid.limit_uusd_per_gpu_hour
    lots = bid.lots
    segments = [Segment(bid.start_min, bid.end_min)]
    starts = [bid.start_min]
    missing = bid.end_min - bid.start_min
    saved = 0
    for ask in asks:
        low, high = max(ask.start_min, bid.start_min), min(ask.end_min, bid.end_min)
        if low >= high:
            continue
        over = ask.price_uusd_per_gpu_hour - limit
        if alone and over > saved:
            break
        at = bisect_right(starts, low) - 1
        while at < len(segments) and segments[at].start_min < high:
            if segments[at].depth < lots:
                at += _split(segments, starts, at, low)
                _split(segments, starts, at, high)
                segment = segments[at]
                taken = min(ask.lots, lots - segment.depth)
                segment.takes.append((ask, taken))
                segment.depth += taken
                saved += max(0, -over) * taken * segment.minutes
                if segment.depth == lots:
                    missing -= segment.minutes
            at += 1
        if not missing:
            break
    return segments


def costs_by_lot(segments: Sequence[Segment]) -> list[int]:
    """What the first, second, ... lot of the whole window costs beyond those before it, as far as all of it is covered:
    never less than the one before."""
    depth = min((segment.depth for segment in segments), default=0)
    costs = [0] * depth
    for segment in segments:
        at = 0
        for ask, lots in segment.takes:
            price = ask.price_uusd_per_gpu_hour * segment.minutes
            for level in range(at, min(at + lots, depth)):
                costs[level] += price
            at += lots
            if at >= depth:
                break
    return costs


def takes_of(segments: Sequence[Segment], lots: Sequence[int]) -> list[Take]:
    """The chosen lots of each segment as the fewest, longest pieces of each ask, by time."""
    held: dict[int, tuple[Ask, list[tuple[int, int, int]]]] = {}
    for segment, wanted in zip(segments, lots, strict=True):
        left = wanted
        for ask, there in segment.takes:
            taken = min(there, left)
            if taken:
                held.setdefault(id(ask), (ask, []))[1].append((segment.start_min, segment.end_min, taken))
            left -= taken
    takes = [Take(ask, *piece) for ask, steps in held.values() for piece in pieces_of(steps)]
    return sorted(takes, key=lambda take: (take.start_min, take.ask.rank, take.end_min, take.lots))


def most_lots(costs: Sequence[int], bid: Bid, minutes: int) -> int:
    """How many lots for the whole window the bid takes at these costs: all, or the most it allows, or none."""
    total, best = 0, 0
    for count, cost in enumerate(costs[: bid.lots], start=1):
        total += cost
        if total > bid.limit_uusd_per_gpu_hour * minutes * count:
            break
        best = count
    return best if best == bid.lots or bid.allow_partial_lots else 0


# ------------------------------------------------------------------------------------------------------- one window


def _chosen(bid: Bid, asks: Iterable[Ask]) -> list[Take]:
    segments = stacked(bid, asks)
    if not bid.allow_partial_time:
        minutes = bid.end_min - bid.start_min
        lots = most_lots(costs_by_lot(segments), bid, minutes)
        return takes_of(segments, [lots] * len(segments)) if lots else []
    levels = [1] * bid.lots if bid.allow_partial_lots else [bid.lots]
    front = [Choice(0, 0, (0,) * len(segments))]
    base = 0
    for step in levels:
        more = _parts_of_level(bid, segments, base, step)
        if not more[0].lot_minutes:
            break  # nothing here, and so nothing above
        front = _pruned(
            Choice(
                a.lot_minutes + b.lot_minutes, a.excess + b.excess, tuple(map(sum, zip(a.lots, b.lots, strict=True)))
            )
            for a in front
            for b in more
        )
        base += step
    best = max(
        (choice for choice in front if choice.excess <= 0), key=lambda choice: (choice.lot_minutes, -choice.excess)
    )
    return takes_of(segments, best.lots)


def _parts_of_level(bid: Bid, segments: Sequence[Segment], base: int, step: int) -> list[Choice]:
    """Of lots base..base+step: the parts of the window that may be taken, none dominated by another. Each run of
    segments is at least the bid's block, or all that there is of the window."""
    block = min(bid.min_block_min, bid.end_min - bid.start_min)
    states: dict[int, list[Choice]] = {0: [Choice(0, 0, ())]}
    for segment in segments:
        cost = _cost_between(segment, base, base + step)
        moved: dict[int, list[Choice]] = defaultdict(list)
        for run, choices in states.items():
            for choice in choices:
                if run == 0 or run >= block:
                    moved[0].append(replace(choice, lots=(*choice.lots, 0)))
                if cost is not None:
                    lot_minutes = segment.minutes * step
                    moved[min(block, run + segment.minutes)].append(
                        Choice(
                            choice.lot_minutes + lot_minutes,
                            choice.excess + cost - bid.limit_uusd_per_gpu_hour * lot_minutes,
                            (*choice.lots, step),
                        )
                    )
        states = {run: _pruned(choices) for run, choices in moved.items()}
    return _pruned(choice for run, choices in states.items() if run == 0 or run >= block for choice in choices)


def _cost_between(segment: Segment, low: int, high: int) -> int | None:
    """What lots low..high of a segment cost; None where it has not so many."""
    if segment.depth < high:
        return None
    cost = at = 0
    for ask, lots in segment.takes:
        overlap = min(at + lots, high) - max(at, low)
        if overlap > 0:
            cost += overlap * ask.price_uusd_per_gpu_hour * segment.minutes
        at += lots
    return cost


def _pruned(choices: Iterable[Choice]) -> list[Choice]:
    """Those that no other beats in both size and cost, largest first; evenly thinned where they are too many."""
    front: list[Choice] = []
    least: int | None = None
    for choice in sorted(
        choices, key=lambda each: (-each.lot_minutes, each.excess, tuple(-lots for lots in each.lots))
    ):
        if least is None or choice.excess < least:
            front.append(choice)
            least = choice.excess
    if len(front) <= FRONT_MAX:
        return front
    last = len(front) - 1
    return [front[round(index * last / (FRONT_MAX - 1))] for index in range(FRONT_MAX)]


# ------------------------------------------------------------------------------------------- slivers, places, starts


def _without_slivers(bid: Bid, asks: Iterable[Ask]) -> list[Take]:
    return leaving_no_sliver(bid, asks, _chosen)


def leaving_no_sliver(bid: Bid, asks: Iterable[Ask], choose: Callable[[Bid, Iterable[Ask]], list[Take]]) -> list[Take]:
    """What `choose` takes, leaving no rest of an ask that its owner would not have: such a rest is bought as well where
    the bid pays for it, and the ask is done without where it does not."""
    usable = asks
    for _ in range(SLIVER_TRIES):
        takes = choose(bid, usable)
        short = _short(takes)
        if not short:
            return takes
        if bid.pays_slivers:
            whole = [_with_slivers(take) for take in takes]
            wanted = sum(take.lot_minutes for take in takes)
            if not _short(whole) and sum(take.cost for take in whole) <= bid.limit_uusd_per_gpu_hour * wanted:
                return whole
        usable = [ask for ask in usable if id(ask) not in short]
    return []


def _short(takes: Sequence[Take]) -> set[int]:
    """The asks, by identity, of which too little would be left somewhere."""
    of: dict[int, list[Take]] = defaultdict(list)
    for take in takes:
        of[id(take.ask)].append(take)
    return {key for key, group in of.items() if slivers_of(group[0].ask, group)}


def _with_slivers(take: Take) -> Take:
    ask, start_min, end_min = take.ask, take.start_min, take.end_min
    if 0 < start_min - ask.start_min < ask.min_block_min:
        start_min = ask.start_min
    if 0 < ask.end_min - end_min < ask.min_block_min:
        end_min = ask.end_min
    return replace(take, start_min=start_min, end_min=end_min)


def _same_nodes(bid: Bid, asks: Sequence[Ask]) -> list[Take]:
    """Only asks that are there for all of it: the lots stay where they are. A part in time is one stretch."""
    windows = [(bid.start_min, bid.end_min)]
    if bid.allow_partial_time:
        edges = sorted(
            {bid.start_min, bid.end_min}
            | {edge for ask in asks for edge in (ask.start_min, ask.end_min) if bid.start_min < edge < bid.end_min}
        )[: FRONT_MAX // 8]
        block = min(bid.min_block_min, bid.end_min - bid.start_min)
        windows = [(low, high) for low in edges for high in edges if high - low >= block]
    best: list[Take] = []
    for start_min, end_min in windows:
        throughout = [ask for ask in asks if ask.start_min <= start_min and ask.end_min >= end_min]
        inside = replace(bid, start_min=start_min, end_min=end_min, allow_partial_time=False)
        found = _without_slivers(inside, throughout)
        if _better(bid, found, best):
            best = found
    return best


def _cheapest_start(bid: Bid, asks: Iterable[Ask], duration_min: int) -> list[Take]:
    """The block of the bid's length within its window that takes most and costs least; of equals the earliest."""
    best: list[Take] = []
    last = bid.end_min - duration_min
    starts = sorted({bid.start_min, *range(-(-bid.start_min // GRID_MIN) * GRID_MIN, last + 1, GRID_MIN)})
    for start_min in starts[:STARTS_MAX]:
        fixed = replace(bid, start_min=start_min, end_min=start_min + duration_min, duration_min=None)
        found = cover(fixed, asks) if start_min <= last else []
        if _better(bid, found, best):
            best = found
    return best


def _better(bid: Bid, one: Sequence[Take], other: Sequence[Take]) -> bool:
    """More of what the bid wants, and then for less money."""
    return (-within(bid, one), sum(take.cost for take in one)) < (
        -within(bid, other),
        sum(take.cost for take in other),
    )


def within(bid: Bid, takes: Iterable[Take]) -> int:
    """Lot-minutes inside the bid's window: slivers that it pays for may lie outside."""
    return sum(take.lots * (min(take.end_min, bid.end_min) - max(take.start_min, bid.start_min)) for take in takes)


# ---------------------------------------------------------------------------------------------------------- the parts


def _split(segments: list[Segment], starts: list[int], at: int, minute: int) -> int:
    """Cut the segment at this minute, if it lies inside it; 1 where it was cut, so that the later part is the next."""
    segment = segments[at]
    if not segment.start_min < minute < segment.end_min:
        return 0
    later = Segment(minute, segment.end_min, list(segment.takes), segment.depth)
    segment.end_min = minute
    segments.insert(at + 1, later)
    starts.insert(at + 1, minute)
    return 1


def pieces_of(steps: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """A step function of lots (in order of time) as (lots, start, end), layer by layer: each as long as it can be."""
    pieces = []
    left = [list(step) for step in steps]
    while left:
        run = [left[0]]
        for step in left[1:]:
            if step[0] != run[-1][1]:
                break
            run.append(step)
        lots = min(step[2] for step in run)
        pieces.append((lots, run[0][0], run[-1][1]))
        for step in run:
            step[2] -= lots
        left = [step for step in left if step[2]]
    return pieces
