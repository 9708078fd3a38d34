"""What is read of the market: what is free, what an organisation holds, what is on offer.

Invariant: what is called free here is what `rent` would find free under its locks at the same moment: slots that
nobody holds in any minute of the window. A lease is reached through its buyer, so another's looks like none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, F, Q, QuerySet, Sum

from marketplace.accounts.models import Organisation
from marketplace.billing.models import AccountKind, LedgerAccount, Meter
from marketplace.catalog.models import GpuModel
from marketplace.core.clock import minute_of, minute_start
from marketplace.core.errors import Conflict, NotFound
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.models import (
    Allocation,
    Contract,
    ContractKind,
    Lease,
    LeasePurpose,
    LeaseState,
    Order,
    OrderState,
    Position,
    Side,
    Sku,
)
from marketplace.trading.positions import Busy, Step, earliest, free_slots, free_until, held_pieces, next_start, spread
from marketplace.trading.windows import may_extend, offered_until_min

SELLING_OF = Q(side=Side.SELL, state=OrderState.OPEN)
PIECE = "."  # between the id of a lease and the first minute of a piece of it
LIVE = (LeaseState.PENDING, LeaseState.ACTIVE)
SORTS = {
    "price": ("price_uusd_per_gpu_hour", "id"),
    "-gpus": ("-gpu_count", "id"),
    "-seen": ("-state_since", "id"),
}


@dataclass(frozen=True)
class Free:
    """What nobody holds from a minute on: `gpus` of an island, all of them until `until_min` (None: no end stated)."""

    gpus: int
    until_min: int | None


def free_gpus(island: Island, start_min: int, end_min: int) -> int:
    """GPUs of the island that nobody holds in any minute of the window."""
    busy = held_slots([island], start_min)[island.pk]
    return len(free_slots(island.lots, busy, start_min, end_min)) * island.gpus_per_lot


def free_until_min(island: Island, gpus: int, from_min: int) -> int | None:
    """Until when `gpus` GPUs could be had from `from_min` on, and no longer than the island is offered.

    `from_min` itself where they cannot be had at all; None: no end stated."""
    lots = -(-gpus // island.gpus_per_lot)
    ends = free_until(island.lots, held_slots([island], from_min)[island.pk], from_min)
    if lots < 1 or len(ends) < lots:
        return from_min
    # Longest first; slots without an end are the longest.
    longest = sorted(ends, key=lambda end: (end is not None, -(end or 0)))[:lots]
    until_min = earliest([longest[-1], offered_until_min(island)])
    return None if until_min is None else max(until_min, from_min)


def free_now(islands: Sequence[Island], from_min: int) -> dict[str, Free]:
    """For many islands at once, by id: the GPUs free in the minute `from_min`, and how long all of them stay so."""
    held = held_slots(islands, from_min)
    found = {}
    for island in islands:
        ends = free_until(island.lots, held[island.pk], from_min)
        closes_min = offered_until_min(island)
        open_now = minute_of(island.available_from) <= from_min and (closes_min is None or closes_min > from_min)
        gpus = len(ends) * island.gpus_per_lot if open_now else 0
        found[island.pk] = Free(gpus, earliest([*ends, closes_min]) if gpus else from_min)
    return found


def extendable_until_min(lease: Lease) -> int | None:
    """How far the lease could be extended: until another holds one of its slots, or the island is no longer offered.

    Its own end where it cannot be; None: no end stated."""
    return extendable_until([lease])[lease.pk]


def extendable_until(leases: Sequence[Lease]) -> dict[str, int | None]:
    """The same for many leases, by id, in three queries. Give them with `island` and `sku` selected."""
    if not leases:
        return {}
    islands = {lease.island_id: lease.island for lease in leases}
    held = held_slots(list(islands.values()), min(lease.end_min for lease in leases))
    slots: dict[str, list[int]] = {}
    for lease_id, slot in Allocation.objects.filter(lease__in=leases).values_list("lease_id", "slot"):
        slots.setdefault(lease_id, []).append(slot)
    found: dict[str, int | None] = {}
    for lease in leases:
        island = islands[lease.island_id]
        if lease.state not in LIVE or not may_extend(lease, island):
            found[lease.pk] = lease.end_min
            continue
        ends = [next_start(slot, held[island.pk], lease.end_min) for slot in slots.get(lease.pk, [])]
        until_min = earliest([*ends, offered_until_min(island)])
        found[lease.pk] = None if until_min is None else max(until_min, lease.end_min)
    return found


def held_slots(islands: Sequence[Island], from_min: int) -> dict[str, list[Busy]]:
    """What is held of each island from `from_min` on. Slots are numbered by the island's shape as it is now: a lease
    of an earlier shape holds all of it, since nobody can say which of today's slots it sits on."""
    by_id = {island.pk: island for island in islands}
    skus = Sku.objects.filter(island__in=list(by_id), retired_at=None)
    current = {sku.island_id: sku.pk for sku in skus if has_shape(sku, by_id[sku.island_id])}
    held: dict[str, list[Busy]] = {island_id: [] for island_id in by_id}
    # One given back before it began holds nothing.
    rows = Allocation.objects.filter(island__in=list(by_id), end_min__gt=from_min).exclude(end_min=F("start_min"))
    for island_id, slot, start_min, end_min, sku_id in rows.values_list(
        "island_id", "slot", "start_min", "end_min", "lease__sku_id"
    ):
        if sku_id == current.get(island_id):
            held[island_id].append(Busy(slot, start_min, end_min))
        else:
            held[island_id] += spread(by_id[island_id].lots, start_min, end_min)
    return held


def has_shape(sku: Sku, island: Island) -> bool:
    """Whether the SKU is the island as it is now."""
    now = (island.organisation_id, island.gpu_id, island.gpus_per_lot, island.lots)
    return (sku.originator_id, sku.gpu_id, sku.gpus_per_lot, sku.lots) == now


def steps_of(sku: Sku, start_min: int, end_min: int) -> list[Step]:
    """The originator's side of the SKU's positions in the window: what was sold of it, as negative lots."""
    rows = Position.objects.filter(sku=sku, originated=True, start_min__lt=end_min, end_min__gt=start_min)
    return [Step(*row) for row in rows.values_list("start_min", "end_min", "delta_lots")]


def leases_of(organisation: Organisation) -> QuerySet[Lease]:
    """Newest first."""
    return (
        Lease.objects.filter(organisation=organisation)
        .select_related("island__site", "sku__gpu", "seller")
        .order_by("-created_at", "-id")
    )


def lease_for(organisation: Organisation, lease_id: str) -> Lease:
    lease = leases_of(organisation).filter(pk=lease_id).first()
    if lease is None:
        raise NotFound("there is no such lease")
    return lease


def reservation_for(organisation: Organisation, lease_id: str) -> Lease:
    """A lease that people extend and end; those of a job are the job's."""
    lease = lease_for(organisation, lease_id)
    if lease.purpose == LeasePurpose.JOB:
        raise Conflict(f"this lease belongs to {lease.job_ref}: cancel the job to end it", code="held_by_job")
    return lease


def spendable_uusd(organisation: Organisation) -> int:
    """The cash that nothing holds."""
    row = LedgerAccount.objects.filter(kind=AccountKind.BUYER_CASH, organisation=organisation, ref="").first()
    return 0 if row is None else row.available_uusd


def orders_of(organisation: Organisation) -> QuerySet[Order]:
    """Newest first."""
    found = Order.objects.filter(organisation=organisation).select_related("island", "gpu", "organisation")
    return found.order_by("-created_at", "-id")


def order_for(organisation: Organisation, order_id: str) -> Order:
    order = orders_of(organisation).filter(pk=order_id).first()
    if order is None:
        raise NotFound("there is no such order")
    return order


def filled_gpu_minutes(orders: Sequence[Order]) -> dict[str, int]:
    """What came of each order so far, by its id."""
    minutes = F("gpus") * (F("end_min") - F("start_min"))
    found: dict[str, int] = {}
    for way in ("order", "sale"):
        of_these = Lease.objects.filter(**{f"{way}__in": [order.pk for order in orders]})
        found.update(of_these.values_list(way).annotate(total=Sum(minutes)))
    return found


def offered_parts(order: Order) -> list[tuple[int, int, int]]:
    """What of an order to sell is still for sale: GPUs and window, in order of time."""
    pieces = held_pieces((start_min, end_min) for _, start_min, end_min in order.offered)
    return [(piece.delta * order.gpus_per_lot, piece.start_min, piece.end_min) for piece in pieces]


def gpus_on_islands() -> QuerySet[GpuModel]:
    """The types an order can be for: those of islands that are let."""
    let = Island.objects.filter(listed=True).exclude(state=IslandState.RETIRED)
    return GpuModel.objects.filter(pk__in=let.values("gpu")).order_by("family", "id")


def held_by(island: Island) -> QuerySet[Lease]:
    """The leases that hold GPUs of the island now or later, by their start."""
    return Lease.objects.filter(island=island, state__in=LIVE).order_by("start_min", "id")


@dataclass(frozen=True)
class Piece:
    """What a lease holds for a time without a change; an agent serves each as an assignment of its own."""

    id: str
    lots: int
    start_min: int
    end_min: int


def pieces_of(leases: Iterable[Lease]) -> dict[str, list[Piece]]:
    """What each lease holds, in order of time, by its id. A lease of which nothing was sold on is one piece, which has
    its id; a later piece is named by its first minute too, and keeps that name whatever is sold after it."""
    windows: dict[str, list[tuple[int, int]]] = {lease.pk: [] for lease in leases}
    starts = {lease.pk: lease.start_min for lease in leases}
    rows = Allocation.objects.filter(lease__in=list(windows)).values_list("lease_id", "start_min", "end_min")
    for lease_id, start_min, end_min in rows:
        windows[lease_id].append((start_min, end_min))
    return {
        lease_id: [
            Piece(
                lease_id if step.start_min == starts[lease_id] else f"{lease_id}{PIECE}{step.start_min}",
                step.delta,
                step.start_min,
                step.end_min,
            )
            for step in held_pieces(held)
        ]
        for lease_id, held in windows.items()
    }


def sellable_slots(lease: Lease, start_min: int, end_min: int) -> list[int]:
    """Slots that the lease holds in every minute of the window and that are not for sale in any of them."""
    held = lease.allocations.filter(start_min__lte=start_min, end_min__gte=end_min).values_list("slot", flat=True)
    offered = [row for rows in lease.sales.filter(SELLING_OF).values_list("offered", flat=True) for row in rows]
    taken = {slot for slot, low, high in offered if low < end_min and high > start_min}
    return sorted(set(held) - taken)


def sold_on(lease: Lease) -> QuerySet[Contract]:
    """What of the lease others bought."""
    return Contract.objects.filter(lease__upstream=lease, kind=ContractKind.RESALE).order_by("start_min", "id")


def sales_of_lease(lease: Lease) -> list[dict[str, Any]]:
    """Its orders to sell, newest first, with what was bought of each."""
    sales = list(lease.sales.order_by("-created_at", "-id"))
    filled = filled_gpu_minutes(sales)
    return [
        {
            "order": sale,
            "starts": minute_start(sale.start_min),
            "ends": minute_start(sale.end_min),
            "sold_pct": filled.get(sale.pk, 0) * 100 // sale.asked_gpu_min,
        }
        for sale in sales
    ]


def lease_of_piece(piece_id: str) -> str:
    return piece_id.partition(PIECE)[0]


def contracts_of(lease: Lease) -> QuerySet[Contract]:
    """The receipts of a lease, oldest first."""
    return Contract.objects.filter(lease=lease).order_by("created_at", "id")


def meters_of(leases: Iterable[Lease]) -> dict[str, Meter]:
    """The meters of the leases with the escrow each is paid from, by the lease's id."""
    return Meter.objects.select_related("escrow").in_bulk([lease.pk for lease in leases])


@dataclass(frozen=True)
class IslandFilter:
    gpu: str | None = None  # a canonical id, or a family
    country: str | None = None
    min_gpus: int | None = None
    max_price_uusd_per_gpu_hour: int | None = None
    preemptible: bool | None = None
    simulated: bool | None = None
    online: bool | None = None
    sort: str = "price"


def island_to_rent(island_id: str) -> Island:
    """The island by its id, on offer or not: why it cannot be rented is said where it is tried."""
    island = Island.objects.select_related("gpu", "site", "organisation").filter(pk=island_id).first()
    if island is None:
        raise NotFound("there is no such island")
    return island


def islands_on_offer(now: datetime, wanted: IslandFilter | None = None) -> QuerySet[Island]:
    """Islands whose owners take leases, now or later."""
    wanted = wanted or IslandFilter()
    found = Island.objects.filter(Q(available_until=None) | Q(available_until__gt=now), listed=True).exclude(
        state=IslandState.RETIRED
    )
    if wanted.gpu is not None:
        found = found.filter(Q(gpu=wanted.gpu) | Q(gpu__family=wanted.gpu))
    if wanted.country is not None:
        found = found.filter(site__country=wanted.country.upper())
    if wanted.min_gpus is not None:
        found = found.filter(gpu_count__gte=wanted.min_gpus)
    if wanted.max_price_uusd_per_gpu_hour is not None:
        found = found.filter(price_uusd_per_gpu_hour__lte=wanted.max_price_uusd_per_gpu_hour)
    if wanted.preemptible is not None:
        found = found.filter(preemptible=wanted.preemptible)
    if wanted.simulated is not None:
        found = found.filter(simulated=wanted.simulated)
    if wanted.online is not None:
        online = Q(state=IslandState.ONLINE)
        found = found.filter(online if wanted.online else ~online)
    return found.select_related("gpu", "site").order_by(*SORTS[wanted.sort])


def sales_of(island: Island, now: datetime) -> dict[str, Any]:
    """What the island sold and delivered, for its owner's page."""
    live = held_by(island).aggregate(leases=Count("id"), gpus=Sum("gpus", filter=Q(start_min__lte=minute_of(now))))
    leases = Lease.objects.filter(island=island)
    sums = Meter.objects.filter(pk__in=leases.values("pk")).aggregate(
        delivered=Sum("billable_gpu_ms"), charged=Sum("charged_uusd"), fee=Sum("fee_uusd")
    )
    fee_uusd = sums["fee"] or 0
    return {
        "gpu_count": island.gpu_count,
        "live": live["leases"],
        "held_gpus": live["gpus"] or 0,
        "leases": leases.count(),
        "delivered_gpu_ms": sums["delivered"] or 0,
        "earned_uusd": (sums["charged"] or 0) - fee_uusd,
        "fee_uusd": fee_uusd,
    }
