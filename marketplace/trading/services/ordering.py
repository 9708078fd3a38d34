"""Orders: placed with their money held, filled as the book allows, cancelled with the rest given back.

Invariant: an order never costs more than what is held for it, and what is held is what it may still cost; a fill is a
lease like any other, booked under the same locks. Locks are taken in the order: order, islands by id, SKUs, the
leases that are sold of, the orders to sell, ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from django.db import IntegrityError, transaction
from django.db.models import Exists, F, Q, QuerySet

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.billing.services.holds import cash, escrow, hold, release
from marketplace.core.clock import minute_of
from marketplace.core.errors import Busy, Conflict, InsufficientFunds, NotFound
from marketplace.core.money import format_usd, window_cost_uusd
from marketplace.fleet.models import Island
from marketplace.trading.book import asks_of, bids_of, candidates, sale_of, slot_of, within_reach
from marketplace.trading.matching import Book, Fill, match
from marketplace.trading.models import ORDER_MACHINE, Lease, LeasePurpose, Order, OrderState, Side, Tif, order_id
from marketplace.trading.models import lease_id as new_lease_id
from marketplace.trading.orders import Change, Wanted, order_of, replacement
from marketplace.trading.selectors import spendable_uusd
from marketplace.trading.services.locking import find_island, lock_sku, waiting_briefly
from marketplace.trading.services.quotes import Given, Quoted, hold_to, read_quote, sign_quote
from marketplace.trading.services.renting import book, live_sku
from marketplace.trading.services.selling import close_sale, held_lease, lock_holders, sweep_sales, take_of_sale

SYSTEM = "system"
TRIES = 3
SWEEP_BATCH = 200
PRIORITY = ("-limit_uusd_per_gpu_hour", "created_at", "id")


@dataclass(frozen=True)
class Lot:
    """Slots of one island for one window at one price: what becomes a lease. `sale_id` is the order to sell that they
    are bought of; None: they are free, and the island's owner lets them."""

    island_id: str
    slots: tuple[int, ...]
    start_min: int
    end_min: int
    price_uusd_per_gpu_hour: int
    sale_id: str | None = None


@dataclass(frozen=True)
class Plan:
    """What an order would take of the book now, and what it would still want."""

    lots: tuple[Lot, ...] = ()
    wanted: tuple[tuple[int, int, int, str | None], ...] = ()

    def cost_uusd(self, gpus_per_lot: int) -> int:
        return sum(
            window_cost_uusd(lot.price_uusd_per_gpu_hour, len(lot.slots) * gpus_per_lot, lot.end_min - lot.start_min)
            for lot in self.lots
        )


@dataclass(frozen=True)
class Preview:
    """What placing the order would do, at this moment. It writes nothing."""

    order: Order
    plan: Plan
    cost_uusd: int
    held_uusd: int
    spendable_uusd: int
    islands: dict[str, Island] = field(default_factory=dict)

    @property
    def gpu_minutes(self) -> int:
        return sum(len(lot.slots) * self.order.gpus_per_lot * (lot.end_min - lot.start_min) for lot in self.plan.lots)

    @property
    def average_uusd_per_gpu_hour(self) -> int | None:
        return self.cost_uusd * 60 // self.gpu_minutes if self.gpu_minutes else None


def preview_order(actor: Actor, wanted: Wanted, now: datetime) -> Preview:
    """The order as it would be placed now, and what of it would be filled at once."""
    demand(actor, Action.VIEW)
    order = order_of(actor.organisation, wanted, key=order_id(), by=actor.name, now=now)
    islands = candidates(order, now)
    plan = plan_of(order, islands, now)
    return Preview(
        order=order,
        plan=plan,
        cost_uusd=plan.cost_uusd(order.gpus_per_lot),
        held_uusd=most_uusd(order),
        spendable_uusd=spendable_uusd(actor.organisation),
        islands={island.pk: island for island in islands},
    )


def give_quote(actor: Actor, wanted: Wanted, seen: Preview, now: datetime) -> Given:
    """What was shown, to place the order with."""
    return sign_quote(actor, wanted, Quoted(seen.cost_uusd, seen.gpu_minutes, seen.order.asked_gpu_min), now)


def place_order(
    actor: Actor, wanted: Wanted, now: datetime, *, key: str | None = None, quote_id: str | None = None
) -> Order:
    """Take the order, hold what it can cost at most, and fill what the book has for it. `key` is the id it shall have,
    one of ours: sent twice, it is one order. With a quote it is placed as was shown or better, or not at all."""
    demand(actor, Action.WORK)
    known = _placed_before(actor, key)
    if known is not None:
        return known
    quoted = None if quote_id is None else read_quote(actor, wanted, quote_id, now)
    order = order_of(actor.organisation, wanted, key=key or order_id(), by=actor.name, now=now)
    try:
        with waiting_briefly(), transaction.atomic():
            order.save(force_insert=True)
            _hold(order)
            record(actor.organisation, actor.name, "order.placed", order.pk, held_uusd=most_uusd(order))
            _fill(order, now)
            if quoted is not None:
                hold_to(quoted, _got(order))
            if order.state == OrderState.OPEN and order.tif != Tif.GTC:
                _close(order, OrderState.CANCELLED, _why_not_all(order), now, by=SYSTEM)
    except IntegrityError as error:
        known = _placed_before(actor, key)
        if known is None:
            raise Conflict("this form was used for another order", code="ticket_used") from error
        return known
    return order


def cancel_order(actor: Actor, key: str, now: datetime) -> Order:
    """Take back what is not filled. One that is closed stays as it closed: its state says what became of it."""
    demand(actor, Action.WORK)
    with waiting_briefly(), transaction.atomic():
        order = _locked(Order.objects.filter(organisation=actor.organisation, pk=key))
        if order is None:
            raise NotFound("there is no such order")
        if order.state == OrderState.OPEN and order.side == Side.SELL:
            close_sale(order, OrderState.CANCELLED, f"cancelled by {actor.name}", now, by=actor.name)
        elif order.state == OrderState.OPEN:
            _close(order, OrderState.CANCELLED, f"cancelled by {actor.name}", now, by=actor.name)
    return order


def amend_order(actor: Actor, key: str, change: Change, now: datetime) -> Order:
    """Put another order in the place of what is not filled of this one, at another price or until another moment."""
    demand(actor, Action.WORK)
    with waiting_briefly(), transaction.atomic():
        old = _locked(Order.objects.filter(organisation=actor.organisation, pk=key))
        if old is None:
            raise NotFound("there is no such order")
        if old.state != OrderState.OPEN:
            raise Conflict(f"this order is closed ({old.get_state_display().lower()})", code="order_closed")
        if len(old.wanted) > 1:
            raise Conflict("what is left of it is in several parts: cancel it, and place one for each", code="in_parts")
        new = replacement(old, change, by=actor.name, now=now)
        why = f"replaced by {new.pk}"
        if old.side == Side.SELL:
            close_sale(old, OrderState.CANCELLED, why, now, by=actor.name)
        else:
            _close(old, OrderState.CANCELLED, why, now, by=actor.name)
        new.save(force_insert=True)
        record(actor.organisation, actor.name, "order.placed", new.pk, replaces=old.pk)
        if new.side == Side.BUY:
            _hold(new)
            _fill(new, now)
    return new


def sweep_orders(now: datetime) -> int:
    """Fill what has become possible and close what is over; each order in a transaction of its own, the dearest first.
    Returns how many were filled or closed.

    Only those are looked at that are over or may find something: an average is never below the cheapest that is asked,
    so bids below the market cost a sweep nothing, however many stand."""
    over = Q(expires_at__lte=now) | Q(start_min__lt=minute_of(now), duration_min=None)
    over |= Q(end_min__lt=minute_of(now) + F("duration_min"))
    standing = Order.objects.filter(over | Exists(within_reach()), side=Side.BUY, state=OrderState.OPEN)
    moved = 0
    for key in list(standing.order_by(*PRIORITY).values_list("pk", flat=True)[:SWEEP_BATCH]):
        try:
            moved += _sweep(key, now)
        except Busy:
            continue
    return moved + sweep_sales(now)


def _sweep(key: str, now: datetime) -> bool:
    with waiting_briefly(), transaction.atomic():
        order = _locked(Order.objects.filter(pk=key, state=OrderState.OPEN))
        if order is None:
            return False
        if order.expires_at is not None and order.expires_at <= now:
            _close(order, OrderState.CANCELLED, "its time ran out", now, by=SYSTEM)
            return True
        return _fill(order, now)


def plan_of(order: Order, islands: Sequence[Island], now: datetime) -> Plan:
    """What the order takes of these islands now. No piece is shorter than who offers it wants to let or sell."""
    asks = asks_of(islands, order.start_min, order.end_min, now)
    least = {island.pk: island.min_lease_min for island in islands}
    for ask in asks:
        door = slot_of(ask.id).door
        if sale_of(door) is not None:
            least[door] = min(least.get(door, ask.min_block_min), ask.end_min - ask.start_min)
    while True:
        outcome = match(Book(asks=tuple(asks), bids=tuple(bids_of(order))), minute_of(now))
        doors = {(slot_of(fill.ask_id).door, fill.end_min - fill.start_min) for fill in outcome.fills}
        short = {door for door, minutes in doors if minutes < least.get(door, 1)}
        if not short:
            break
        asks = [ask for ask in asks if slot_of(ask.id).door not in short]
    left = tuple(
        (bid.lots * order.gpus_per_lot, bid.start_min, bid.end_min, None if bid.skus is None else min(bid.skus))
        for bid in outcome.bids
    )
    return Plan(_lots(outcome.fills), left)


def most_uusd(order: Order) -> int:
    """What the rest of the order can cost at most."""
    return sum(
        window_cost_uusd(order.limit_uusd_per_gpu_hour, gpus, order.duration_min or end_min - start_min)
        for gpus, start_min, end_min, _ in order.wanted
    )


def _fill(order: Order, now: datetime) -> bool:
    """Book what the book has for the order; whether anything changed. What was seen without locks is seen again under
    those of the islands it lies on; if it is not there any more, the next look is taken."""
    islands = candidates(order, now)
    for _ in range(TRIES):
        seen = plan_of(order, islands, now)
        locked = [_lock(island_id, now) for island_id in sorted({lot.island_id for lot in seen.lots})]
        lock_holders({lot.sale_id for lot in seen.lots if lot.sale_id is not None})
        plan = plan_of(order, locked, now)
        if plan.lots == seen.lots or not locked:
            break
        islands = candidates(order, now)
    else:
        return False
    if not plan.lots and len(plan.wanted) == len(order.wanted):
        return False  # time alone may move where a block can begin, which changes nothing of what is held
    release(escrow(order.pk, order.organisation), cash(order.organisation))
    by_id = {island.pk: island for island in locked}
    for lot in plan.lots:
        _book(order, lot, by_id[lot.island_id], now)
    order.wanted = [list(row) for row in plan.wanted]
    order.save(update_fields=["wanted"])
    if not order.wanted:
        if _is_whole(order):
            _close(order, OrderState.FILLED, "", now, by=SYSTEM)
        elif order.quorum_gpus is not None and plan.lots:
            _close(order, OrderState.FILLED, "its quorum is had, and what the limit bears above it", now, by=SYSTEM)
        elif order.tif == Tif.GTC:
            why = "the rest does not go with what it got" if plan.lots else "what was left of it had to begin by now"
            _close(order, OrderState.CANCELLED, why, now, by=SYSTEM)
    elif order.tif == Tif.GTC:
        _hold(order)
    return True


def _lock(island_id: str, now: datetime) -> Island:
    island = find_island(island_id, locked=True)
    lock_sku(live_sku(island, now).pk)
    return island


def _book(order: Order, lot: Lot, island: Island, now: datetime) -> None:
    sale = None if lot.sale_id is None else take_of_sale(lot.sale_id, lot.slots, lot.start_min, lot.end_min, now)
    sku = live_sku(island, now) if sale is None else held_lease(sale).sku
    gpus = len(lot.slots) * sku.gpus_per_lot
    lease = Lease(
        id=new_lease_id(),
        organisation=order.organisation,
        seller=island.organisation if sale is None else sale.organisation,
        sku=sku,
        island=island,
        sale=sale,
        upstream=None if sale is None else sale.of_lease,
        lots=len(lot.slots),
        gpus=gpus,
        order=order,
        purpose=LeasePurpose.RESERVE,
        price_uusd_per_gpu_hour=lot.price_uusd_per_gpu_hour,
        start_min=lot.start_min,
        end_min=lot.end_min,
        created_by=order.created_by,
    )
    book(lease, lot.slots, window_cost_uusd(lot.price_uusd_per_gpu_hour, gpus, lot.end_min - lot.start_min), now)


def _lots(fills: Sequence[Fill]) -> tuple[Lot, ...]:
    """Fills of the same window and price of one seller on one island are one lease."""
    together: dict[tuple[str, str, int, int, int], list[int]] = defaultdict(list)
    for fill in fills:
        slot = slot_of(fill.ask_id)
        price = fill.price_uusd_per_gpu_hour or 0
        together[fill.island, slot.door, fill.start_min, fill.end_min, price].append(slot.number)
    return tuple(
        Lot(island_id, tuple(sorted(slots)), start_min, end_min, price, sale_of(door))
        for (island_id, door, start_min, end_min, price), slots in sorted(together.items())
    )


def _hold(order: Order) -> None:
    amount = most_uusd(order)
    order.holds += 1
    order.save(update_fields=["holds"])
    try:
        hold(order.pk, order.organisation, amount, order.holds)
    except InsufficientFunds as error:
        have = format_usd(spendable_uusd(order.organisation))
        raise InsufficientFunds(f"this order holds {format_usd(amount)}, and {have} cash is free") from error


def _close(order: Order, state: OrderState, reason: str, now: datetime, *, by: str) -> None:
    ORDER_MACHINE.advance(Order.objects.filter(pk=order.pk), state, reason=reason, closed_at=now, wanted=[])
    order.state, order.reason, order.closed_at, order.wanted = state, reason, now, []
    released = release(escrow(order.pk, order.organisation), cash(order.organisation))
    record(order.organisation, by, f"order.{state}", order.pk, released_uusd=released, reason=reason)


def _why_not_all(order: Order) -> str:
    return "the rest could not be had at once" if order.leases.exists() else "nothing could be had at once"


def _locked(rows: QuerySet[Order]) -> Order | None:
    return rows.select_related("organisation").select_for_update(of=("self",), no_key=True).first()


def _is_whole(order: Order) -> bool:
    """Whether its leases are all that was asked for."""
    return _got(order).filled_gpu_min >= order.asked_gpu_min


def _got(order: Order) -> Quoted:
    rows = order.leases.values_list("price_uusd_per_gpu_hour", "gpus", "start_min", "end_min")
    parts = [(price, gpus * (end_min - start_min)) for price, gpus, start_min, end_min in rows]
    cost_uusd = sum(window_cost_uusd(price, gpu_min, 1) for price, gpu_min in parts)
    return Quoted(cost_uusd, sum(gpu_min for _, gpu_min in parts), order.asked_gpu_min)


def _placed_before(actor: Actor, key: str | None) -> Order | None:
    return None if key is None else Order.objects.filter(organisation=actor.organisation, pk=key).first()
