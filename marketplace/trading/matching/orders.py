"""Orders, what of them is left, and fills: frozen rows of integers.

Units: time in whole UTC minutes [start_min, end_min), quantity in lots of equal size, price in micro-USD per GPU-hour
and a multiple of 60, so that the price of a lot-minute is an integer; `value` is in micro-USD for lots of one GPU, and
scales with their size. `accepted` is the sequence number under which the order was taken in: earlier is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

MINUTES_PER_HOUR = 60
PRICE_STEP_UUSD = 60
MIN_BLOCK_MIN = 60


class Tif(StrEnum):
    """How long an order stands: all of it at once or nothing; what can be had at once; until it is cancelled or, where
    it has an `expires_min`, until then."""

    FOK = "fok"
    IOC = "ioc"
    GTC = "gtc"


class Colocation(StrEnum):
    """Where the lots of a bid may lie: on the same machines throughout, on one island, or anywhere."""

    SAME_NODES = "same_nodes"
    SAME_ISLAND = "same_island"
    ANY = "any"


@dataclass(frozen=True)
class Ask:
    """`lots` for sale over a window. `min_block_min`: what is left of it in time is nothing or at least so long.
    `all_or_none`: it is sold whole, for at least its price, to however many bids fill it."""

    id: str
    account: str
    sku: str
    island: str
    lots: int
    start_min: int
    end_min: int
    price_uusd_per_gpu_hour: int
    accepted: int
    min_block_min: int = MIN_BLOCK_MIN
    all_or_none: bool = False
    post_only: bool = False
    expires_min: int | None = None

    @property
    def rank(self) -> tuple[int, int, str, int, int]:
        """Before others: cheaper, then earlier, then by id; parts of one ask by their place in time."""
        return (self.price_uusd_per_gpu_hour, self.accepted, self.id, self.start_min, self.end_min)


@dataclass(frozen=True)
class Basket:
    """One bid over several islands: at least `quorum_lots` in all or nothing, each island with at least
    `min_lots_per_island` for the whole window; beyond the quorum as many as the limit bears."""

    quorum_lots: int
    min_lots_per_island: int = 1


@dataclass(frozen=True)
class Bid:
    """A wish for `lots` over a window at an average of at most `limit`. `skus` None: any. With `duration_min` the
    window is where a block of that length may lie. `pays_slivers`: it buys what would be left too short of an ask."""

    id: str
    account: str
    lots: int
    start_min: int
    end_min: int
    limit_uusd_per_gpu_hour: int
    accepted: int
    skus: frozenset[str] | None = None
    duration_min: int | None = None
    tif: Tif = Tif.GTC
    allow_partial_lots: bool = False
    allow_partial_time: bool = False
    min_block_min: int = MIN_BLOCK_MIN
    colocation: Colocation = Colocation.ANY
    basket: Basket | None = None
    pays_slivers: bool = False
    post_only: bool = False
    expires_min: int | None = None
    part: int = 0  # what is left of a bid may be several parts, which stand on their own

    def __post_init__(self) -> None:
        if self.basket is not None and self.duration_min is not None:
            raise ValueError("a basket is for the whole window: it has no block to place within it")
        if self.pays_slivers and self.duration_min is not None:
            raise ValueError("a block is placed where it leaves no sliver: it buys none")

    @property
    def rank(self) -> tuple[int, int, str, int]:
        """Before others: dearer, then earlier, then by id."""
        return (-self.limit_uusd_per_gpu_hour, self.accepted, self.id, self.part)


@dataclass(frozen=True)
class Fill:
    """`lots` of an ask for a bid over [start_min, end_min): one contract."""

    bid_id: str
    ask_id: str
    buyer: str
    seller: str
    sku: str
    island: str
    lots: int
    start_min: int
    end_min: int
    value_uusd: int  # for lots of one GPU
    price_uusd_per_gpu_hour: int | None  # None: a share of an ask that is sold whole

    @property
    def lot_minutes(self) -> int:
        return self.lots * (self.end_min - self.start_min)


@dataclass(frozen=True)
class Take:
    """`lots` of one resting ask over a piece of a bid's window."""

    ask: Ask
    lots: int
    start_min: int
    end_min: int

    @property
    def lot_minutes(self) -> int:
        return self.lots * (self.end_min - self.start_min)

    @property
    def cost(self) -> int:
        """In micro-USD per GPU-hour times lot-minutes: what averages are compared in, without a division."""
        return self.ask.price_uusd_per_gpu_hour * self.lot_minutes


def value_uusd(price_uusd_per_gpu_hour: int, lot_minutes: int) -> int:
    """For lots of one GPU; exact, because prices are multiples of 60."""
    return price_uusd_per_gpu_hour // MINUTES_PER_HOUR * lot_minutes


def without(ask: Ask, lots: int, start_min: int, end_min: int) -> list[Ask]:
    """What is left of an ask when `lots` of it go for a part of its time: the rest of its lots whole, and the sold lots
    before and after."""
    if not (0 < lots <= ask.lots and ask.start_min <= start_min < end_min <= ask.end_min):
        raise ValueError("what is taken must lie inside the ask")
    left = []
    if lots < ask.lots:
        left.append(replace(ask, lots=ask.lots - lots))
    if start_min > ask.start_min:
        left.append(replace(ask, lots=lots, end_min=start_min))
    if end_min < ask.end_min:
        left.append(replace(ask, lots=lots, start_min=end_min))
    return left


def rest_of(ask: Ask, takes: Sequence[Take]) -> list[Ask]:
    """What is left of an ask after these takes of it. Each goes where it leaves the least time over, so that the rest
    stays in long pieces."""
    pieces = [ask]
    for take in sorted(takes, key=lambda each: (each.start_min - each.end_min, each.start_min, -each.lots)):
        lots = take.lots
        while lots:
            inside = [piece for piece in pieces if piece.start_min <= take.start_min and take.end_min <= piece.end_min]
            if not inside:
                raise ValueError("more is taken of the ask than it has")
            piece = min(inside, key=lambda each: (each.end_min - each.start_min, each.start_min, each.lots))
            taken = min(lots, piece.lots)
            pieces.remove(piece)
            pieces += without(piece, taken, take.start_min, take.end_min)
            lots -= taken
    return pieces


def slivers_of(ask: Ask, takes: Sequence[Take]) -> list[Ask]:
    """What these takes would leave of the ask that is shorter than it allows."""
    least = min(ask.min_block_min, ask.end_min - ask.start_min)
    return [piece for piece in rest_of(ask, takes) if piece.end_min - piece.start_min < least]
