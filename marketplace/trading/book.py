"""The order book as it stands: islands' free slots as asks, orders as bids, in the words of `trading.matching`.

Invariant: reads only. An island offers a slot for as long as nobody holds it and its owner lets it; what it asks is its
price now. Every slot is an ask of its own, so that a fill says on which machine it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import OuterRef, Q, QuerySet

from marketplace.core.clock import minute_of, to_ms
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.matching import Ask, Basket, Bid
from marketplace.trading.matching import Colocation as Where
from marketplace.trading.matching import Tif as Standing
from marketplace.trading.models import Order
from marketplace.trading.positions import Busy
from marketplace.trading.selectors import held_slots
from marketplace.trading.windows import NO_MORE, offered_until_min

# Islands looked at for one order, the cheapest first: an order takes of a few.
ISLANDS_MAX = 500
CLOSED = (*NO_MORE, IslandState.REGISTERED)


@dataclass(frozen=True)
class Slot:
    """What an ask of the book stands for."""

    island_id: str
    number: int


def candidates(order: Order, now: datetime) -> list[Island]:
    """Islands that may serve a part of the order, the cheapest first."""
    found: QuerySet[Island] = Island.objects.filter(listed=True).exclude(state__in=CLOSED)
    found = found.filter(pk=order.island_id) if order.island_id else found.filter(gpu=order.gpu_id)
    found = found.filter(Q(available_until=None) | Q(available_until__gt=now), gpus_per_lot=order.gpus_per_lot)
    found = found.exclude(organisation=order.organisation_id)
    return list(
        found.select_related("gpu", "site", "organisation").order_by("price_uusd_per_gpu_hour", "id")[:ISLANDS_MAX]
    )


def within_reach() -> QuerySet[Island]:
    """For a query of orders: an island that may serve this one and asks no more than its limit."""
    here = Q(pk=OuterRef("island")) | Q(gpu=OuterRef("gpu"), gpus_per_lot=OuterRef("gpus_per_lot"))
    asking = Island.objects.filter(here, price_uusd_per_gpu_hour__lte=OuterRef("limit_uusd_per_gpu_hour"), listed=True)
    return asking.exclude(state__in=CLOSED).exclude(organisation=OuterRef("organisation"))


def asks_of(islands: Sequence[Island], start_min: int, end_min: int, now: datetime) -> list[Ask]:
    """The free time of every slot within the window; an island that is not online offers nothing that begins now."""
    now_min = minute_of(now)
    held = held_slots(islands, start_min)
    asks = []
    for island in islands:
        closes_min = offered_until_min(island)
        low = max(
            start_min, minute_of(island.available_from), now_min if island.state == IslandState.ONLINE else now_min + 1
        )
        high = end_min if closes_min is None else min(end_min, closes_min)
        for slot in range(island.lots):
            for free_from, free_until in _free(slot, held[island.pk], low, high):
                asks.append(_ask(island, slot, free_from, free_until))
    return sorted(asks, key=lambda ask: ask.rank)


def slot_of(ask_id: str) -> Slot:
    island_id, _, number = ask_id.rpartition("/")
    return Slot(island_id, int(number))


def bids_of(order: Order) -> list[Bid]:
    """What the order still wants, each part by itself."""
    lot = order.gpus_per_lot
    return [
        Bid(
            id=order.pk,
            account=str(order.organisation_id),
            lots=gpus // lot,
            start_min=start_min,
            end_min=end_min,
            limit_uusd_per_gpu_hour=order.limit_uusd_per_gpu_hour,
            accepted=to_ms(order.created_at),
            skus=None if island_id is None else frozenset({island_id}),
            duration_min=order.duration_min,
            tif=Standing(order.tif),
            allow_partial_lots=order.allow_partial_gpus,
            allow_partial_time=order.allow_partial_time,
            min_block_min=order.min_block_min,
            colocation=Where(order.colocation),
            basket=_basket(order),
            part=part,
        )
        for part, (gpus, start_min, end_min, island_id) in enumerate(order.wanted)
    ]


def _basket(order: Order) -> Basket | None:
    if order.quorum_gpus is None or order.min_gpus_per_island is None:
        return None
    lot = order.gpus_per_lot
    return Basket(-(-order.quorum_gpus // lot), -(-order.min_gpus_per_island // lot))


def _ask(island: Island, slot: int, start_min: int, end_min: int) -> Ask:
    return Ask(
        id=f"{island.pk}/{slot}",
        account=str(island.organisation_id),
        sku=island.pk,
        island=island.pk,
        lots=1,
        start_min=start_min,
        end_min=end_min,
        price_uusd_per_gpu_hour=island.price_uusd_per_gpu_hour,
        accepted=0,  # an offer stands at its price for whoever comes: it is the resting order of every trade
        min_block_min=1,
    )


def _free(slot: int, busy: Iterable[Busy], low: int, high: int) -> list[tuple[int, int]]:
    """The stretches of [low, high) in which nobody holds the slot."""
    stretches, at = [], low
    for each in sorted((each for each in busy if each.slot == slot), key=lambda each: each.start_min):
        if each.start_min > at:
            stretches.append((at, min(each.start_min, high)))
        at = max(at, each.end_min)
        if at >= high:
            break
    if at < high:
        stretches.append((at, high))
    return [(start, end) for start, end in stretches if start < end]
