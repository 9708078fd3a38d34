"""The order book as it stands: islands' free slots and what holders sell on as asks, orders as bids, in the words of
`trading.matching`.

Invariant: reads only. An island offers a slot for as long as nobody holds it and its owner lets it; what it asks is its
price now. Every slot is an ask of its own, so that a fill says on which machine it lies. Nobody buys of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Exists, OuterRef, Q, QuerySet

from marketplace.core.clock import minute_of, to_ms
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.matching import Ask, Basket, Bid
from marketplace.trading.matching import Colocation as Where
from marketplace.trading.matching import Tif as Standing
from marketplace.trading.models import Order
from marketplace.trading.positions import Busy
from marketplace.trading.selectors import SELLING_OF, held_slots
from marketplace.trading.windows import NO_MORE, offered_until_min

# Between the sale of minutes and their first: time to leave for what runs there.
NOTICE_MIN = 10
# Islands looked at for one order, the cheapest first: an order takes of a few.
ISLANDS_MAX = 500
CLOSED = (*NO_MORE, IslandState.REGISTERED)


@dataclass(frozen=True)
class Slot:
    """What an ask of the book stands for: a slot at a door, which is an island or somebody's order to sell."""

    door: str
    number: int


def candidates(order: Order, now: datetime) -> list[Island]:
    """Islands of which a part of the order may be had, the cheapest first."""
    found: QuerySet[Island] = Island.objects.exclude(state__in=CLOSED)
    found = found.filter(pk=order.island_id) if order.island_id else found.filter(gpu=order.gpu_id)
    selling = Order.objects.filter(SELLING_OF, island=OuterRef("pk"))
    let = Q(available_until=None) | Q(available_until__gt=now), Q(listed=True)
    found = found.filter(Q(*let) | Exists(selling), gpus_per_lot=order.gpus_per_lot)
    found = found.exclude(organisation=order.organisation_id)
    return list(
        found.select_related("gpu", "site", "organisation").order_by("price_uusd_per_gpu_hour", "id")[:ISLANDS_MAX]
    )


def within_reach() -> QuerySet[Island]:
    """For a query of orders: an island where this one may be served at no more than its limit."""
    here = Q(pk=OuterRef("island")) | Q(gpu=OuterRef("gpu"), gpus_per_lot=OuterRef("gpus_per_lot"))
    limit = OuterRef("limit_uusd_per_gpu_hour")
    selling = Order.objects.filter(
        SELLING_OF,
        island=OuterRef("pk"),
        limit_uusd_per_gpu_hour__lte=OuterRef(limit),
        end_min__gt=OuterRef(OuterRef("start_min")),
    ).exclude(organisation=OuterRef(OuterRef("organisation")))
    asking = Island.objects.filter(here, Q(price_uusd_per_gpu_hour__lte=limit, listed=True) | Exists(selling))
    return asking.exclude(state__in=CLOSED).exclude(organisation=OuterRef("organisation"))


def asks_of(islands: Sequence[Island], start_min: int, end_min: int, now: datetime) -> list[Ask]:
    """What is offered within the window: the free time of every slot, and what holders sell on. An island that is not
    online offers nothing that begins now."""
    asks = [*_free_time(islands, start_min, end_min, now), *_sold_on(islands, start_min, end_min, now)]
    return sorted(asks, key=lambda ask: ask.rank)


def slot_of(ask_id: str) -> Slot:
    door, _, number = ask_id.rpartition("/")
    return Slot(door, int(number))


def sale_of(door: str) -> str | None:
    """The order to sell that this door is; None for an island's own."""
    return door if door.startswith("ord_") else None


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


def _free_time(islands: Sequence[Island], start_min: int, end_min: int, now: datetime) -> Iterator[Ask]:
    held = held_slots(islands, start_min)
    for island in islands:
        if not island.listed:
            continue
        closes_min = offered_until_min(island)
        low = max(start_min, minute_of(island.available_from), _earliest_min(island, now))
        high = end_min if closes_min is None else min(end_min, closes_min)
        for slot in range(island.lots):
            for free_from, free_until in _free(slot, held[island.pk], low, high):
                yield Ask(
                    id=f"{island.pk}/{slot}",
                    account=str(island.organisation_id),
                    sku=island.pk,
                    island=island.pk,
                    lots=1,
                    start_min=free_from,
                    end_min=free_until,
                    price_uusd_per_gpu_hour=island.price_uusd_per_gpu_hour,
                    accepted=0,  # it stands at its price for whoever comes: the resting order of every trade
                    min_block_min=1,
                )


def _sold_on(islands: Sequence[Island], start_min: int, end_min: int, now: datetime) -> Iterator[Ask]:
    by_id = {island.pk: island for island in islands}
    sales = Order.objects.filter(SELLING_OF, island__in=list(by_id), start_min__lt=end_min, end_min__gt=start_min)
    sales = sales.filter(of_lease__sku__retired_at=None)
    for sale in sales.filter(Q(expires_at=None) | Q(expires_at__gt=now)).order_by("pk"):
        island = by_id[str(sale.island_id)]
        low = max(start_min, earliest_sale_min(now))
        for slot, slot_from, slot_until in sale.offered:
            if max(slot_from, low) < min(slot_until, end_min):
                yield Ask(
                    id=f"{sale.pk}/{slot}",
                    account=str(sale.organisation_id),
                    sku=island.pk,
                    island=island.pk,
                    lots=1,
                    start_min=max(slot_from, low),
                    end_min=slot_until,
                    price_uusd_per_gpu_hour=sale.limit_uusd_per_gpu_hour,
                    accepted=to_ms(sale.created_at),
                    min_block_min=sale.min_block_min,
                )


def earliest_sale_min(now: datetime) -> int:
    """Who holds GPUs is told before they are another's: what is sold on begins no earlier."""
    return minute_of(now) + NOTICE_MIN


def _earliest_min(island: Island, now: datetime) -> int:
    return minute_of(now) + (island.state != IslandState.ONLINE)


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
