"""Selling on: a part of a lease for sale, until somebody buys it.

Invariant: what is for sale is held by the lease in every minute of it and is for sale once; it stays the holder's until
it is bought, so that nothing is lost by offering it. Who sells on goes on paying what they pay, and earns what is
delivered to the buyer, minute by minute. Locks: the island, the SKU, the lease, the order to sell; in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import IntegrityError, transaction

from marketplace.accounts.access import Action, Actor, demand
from marketplace.accounts.audit import record
from marketplace.core.clock import minute_of
from marketplace.core.errors import Busy, Conflict, FieldProblem, InvalidInput, NotFound
from marketplace.core.money import PRICE_STEP_UUSD_PER_GPU_HOUR, fee_uusd, window_cost_uusd
from marketplace.trading.book import earliest_sale_min
from marketplace.trading.models import ORDER_MACHINE, Lease, LeasePurpose, Order, OrderState, Side, Tif, order_id
from marketplace.trading.orders import MIN_BLOCK_MIN
from marketplace.trading.selectors import LIVE, SELLING_OF, sellable_slots
from marketplace.trading.services.locking import find_island, lock_lease, lock_sku, waiting_briefly
from marketplace.trading.services.trades import cut_slots
from marketplace.trading.windows import NOT_AVAILABLE, whole_minutes_until

SYSTEM = "system"
SWEEP_BATCH = 200


@dataclass(frozen=True)
class Offer:
    """A part of a lease for sale. `start_at` None: from the earliest moment on; `end_at` None: to its end."""

    lease_id: str
    gpus: int
    limit_uusd_per_gpu_hour: int  # at least
    start_at: datetime | None = None
    end_at: datetime | None = None
    min_block_min: int = MIN_BLOCK_MIN
    expires_at: datetime | None = None


@dataclass(frozen=True)
class SalePreview:
    """What the sale would bring if all of it was bought and delivered; it writes nothing."""

    order: Order
    slots: tuple[int, ...]
    gross_uusd: int
    fee_uusd: int
    paying_uusd: int  # what the holder goes on paying for these minutes

    @property
    def net_uusd(self) -> int:
        return self.gross_uusd - self.fee_uusd


def preview_sale(actor: Actor, offer: Offer, now: datetime) -> SalePreview:
    demand(actor, Action.VIEW)
    lease = _mine(actor, offer.lease_id)
    order, slots = _order_of(actor, lease, offer, order_id(), now)
    minutes = order.end_min - order.start_min
    gross = window_cost_uusd(order.limit_uusd_per_gpu_hour, order.gpus, minutes)
    return SalePreview(
        order=order,
        slots=slots,
        gross_uusd=gross,
        fee_uusd=fee_uusd(gross, settings.MARKET_FEE_BPS),
        paying_uusd=window_cost_uusd(lease.price_uusd_per_gpu_hour, order.gpus, minutes),
    )


def place_sale(actor: Actor, offer: Offer, now: datetime, *, key: str | None = None) -> Order:
    """Put a part of a lease up for sale. `key` is the id the order shall have: sent twice, it is one order."""
    demand(actor, Action.WORK)
    known = None if key is None else Order.objects.filter(organisation=actor.organisation, pk=key).first()
    if known is not None:
        return known
    lease = _mine(actor, offer.lease_id)
    try:
        with waiting_briefly(), transaction.atomic():
            find_island(lease.island_id, locked=True)
            lock_sku(lease.sku_id)
            lease = lock_lease(lease.pk)
            order, slots = _order_of(actor, lease, offer, key or order_id(), now)
            order.offered = [[slot, order.start_min, order.end_min] for slot in slots]
            order.save(force_insert=True)
            record(actor.organisation, actor.name, "order.placed", order.pk, sells=lease.pk, gpus=order.gpus)
    except IntegrityError as error:
        known = Order.objects.filter(organisation=actor.organisation, pk=key).first()
        if known is None:
            raise Conflict("this form was used for another order", code="ticket_used") from error
        return known
    return order


def lock_holders(sale_ids: Collection[str]) -> None:
    """Before what is for sale is looked at to be bought: the leases it is of, so that none ends meanwhile."""
    holders = Order.objects.filter(pk__in=sale_ids).order_by("of_lease").values_list("of_lease", flat=True).distinct()
    for lease_id in list(holders):
        if lease_id is not None:
            lock_lease(lease_id)


def take_of_sale(sale_id: str, slots: Sequence[int], start_min: int, end_min: int, now: datetime) -> Order:
    """Take these slots for [start_min, end_min) out of what is for sale and from the lease that held them. The caller
    holds the locks and books the lease of who buys."""
    sale = (
        Order.objects.select_related("organisation")
        .select_for_update(of=("self",), no_key=True)
        .filter(pk=sale_id)
        .get()
    )
    if sale.state != OrderState.OPEN:
        raise Busy("what is for sale was taken back at this moment; nothing was done")
    cut_slots(held_lease(sale), slots, start_min, end_min)
    left = []
    for slot, offered_from, offered_until in sale.offered:
        if slot in slots and offered_from <= start_min and end_min <= offered_until:
            left += [
                [slot, low, high] for low, high in ((offered_from, start_min), (end_min, offered_until)) if low < high
            ]
        else:
            left.append([slot, offered_from, offered_until])
    sale.offered = left
    sale.save(update_fields=["offered"])
    if not left:
        close_sale(sale, OrderState.FILLED, "", now, by=SYSTEM)
    return sale


def sweep_sales(now: datetime) -> int:
    """Close what nobody can buy any longer: its time ran out, or what is left of it begins too soon."""
    closed = 0
    over = Order.objects.filter(SELLING_OF, end_min__lte=earliest_sale_min(now))
    late = Order.objects.filter(SELLING_OF, expires_at__lte=now)
    for key in list((over | late).order_by("pk").values_list("pk", flat=True)[:SWEEP_BATCH]):
        with waiting_briefly(), transaction.atomic():
            rows = Order.objects.filter(SELLING_OF, pk=key).select_related("organisation")
            sale = rows.select_for_update(of=("self",), no_key=True).first()
            if sale is not None:
                expired = sale.expires_at is not None and sale.expires_at <= now
                why = "its time ran out" if expired else "nobody bought the rest in time"
                close_sale(sale, OrderState.CANCELLED, why, now, by=SYSTEM)
                closed += 1
    return closed


def close_sale(sale: Order, state: OrderState, reason: str, now: datetime, *, by: str) -> None:
    ORDER_MACHINE.advance(Order.objects.filter(pk=sale.pk), state, reason=reason, closed_at=now, offered=[])
    sale.state, sale.reason, sale.closed_at, sale.offered = state, reason, now, []
    record(sale.organisation, by, f"order.{state}", sale.pk, reason=reason)


def held_lease(sale: Order) -> Lease:
    if sale.of_lease is None:
        raise ValueError(f"{sale.pk} sells nothing")
    return sale.of_lease


def _mine(actor: Actor, lease_id: str) -> Lease:
    rows = Lease.objects.select_related("sku", "island", "organisation")
    lease = rows.filter(organisation=actor.organisation, pk=lease_id).first()
    if lease is None:
        raise NotFound.at("lease_id", "there is no such lease")
    return lease


def _order_of(actor: Actor, lease: Lease, offer: Offer, key: str, now: datetime) -> tuple[Order, tuple[int, ...]]:
    """The order, not saved, and the slots it is for; every field that is wrong at once."""
    if lease.purpose == LeasePurpose.JOB:
        raise Conflict(f"this lease belongs to {lease.job_ref}: cancel the job to sell its hours", code="held_by_job")
    if lease.state not in LIVE:
        raise Conflict("this lease is over", code="lease_over")
    if lease.sku.retired_at is not None:
        raise Conflict(
            "the machine is not what it was when this was rented: its hours cannot be sold", code=NOT_AVAILABLE
        )
    first_min = max(lease.start_min, earliest_sale_min(now))
    start_min = first_min if offer.start_at is None else minute_of(offer.start_at)
    end_min = lease.end_min if offer.end_at is None else whole_minutes_until(offer.end_at)
    problems = _problems(lease, offer, start_min, end_min, first_min, now)
    if problems:
        raise InvalidInput(problems[0].message if len(problems) == 1 else "some fields are not right", fields=problems)
    lots = offer.gpus // lease.sku.gpus_per_lot
    slots = sellable_slots(lease, start_min, end_min)
    if len(slots) < lots:
        have = len(slots) * lease.sku.gpus_per_lot
        raise Conflict.at(
            "gpus", f"{have or 'none'} of this lease can be sold over the whole window", code=NOT_AVAILABLE
        )
    order = Order(
        id=key,
        organisation=actor.organisation,
        side=Side.SELL,
        of_lease=lease,
        island=lease.island,
        gpus_per_lot=lease.sku.gpus_per_lot,
        gpus=offer.gpus,
        start_min=start_min,
        end_min=end_min,
        limit_uusd_per_gpu_hour=offer.limit_uusd_per_gpu_hour,
        tif=Tif.GTC,
        colocation="any",
        allow_partial_gpus=True,
        allow_partial_time=True,
        min_block_min=offer.min_block_min,
        expires_at=offer.expires_at,
        created_by=actor.name,
        created_at=now,
    )
    return order, tuple(slots[:lots])


def _problems(
    lease: Lease, offer: Offer, start_min: int, end_min: int, first_min: int, now: datetime
) -> list[FieldProblem]:
    found = []
    lot, price = lease.sku.gpus_per_lot, offer.limit_uusd_per_gpu_hour
    if not 1 <= offer.gpus <= lease.gpus:
        found.append(FieldProblem("gpus", f"from 1 to {lease.gpus}"))
    elif offer.gpus % lot:
        found.append(FieldProblem("gpus", f"are sold {lot} together: give a multiple of it"))
    if price < PRICE_STEP_UUSD_PER_GPU_HOUR or price % PRICE_STEP_UUSD_PER_GPU_HOUR:
        found.append(FieldProblem("limit_uusd_per_gpu_hour", f"a multiple of {PRICE_STEP_UUSD_PER_GPU_HOUR}"))
    if start_min < first_min:
        found.append(FieldProblem("start_at", "too soon: what runs there needs time to leave, and the lease to begin"))
    if end_min > lease.end_min:
        found.append(FieldProblem("end_at", "is after the end of the lease"))
    if end_min <= start_min:
        found.append(FieldProblem("end_at", "must be later than the start"))
    elif not 1 <= offer.min_block_min <= end_min - start_min:
        found.append(FieldProblem("min_block_min", "must fit into the window"))
    if offer.expires_at is not None and offer.expires_at <= now:
        found.append(FieldProblem("expires_at", "must be in the future"))
    return found
