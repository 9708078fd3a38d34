"""Renting and extending: GPU-minutes against money held, in one transaction or not at all.

Invariant: no minute of a GPU is sold twice. Whoever sells holds the island's row and the SKU's lock, reads again, finds
the free minimum of the window by the positions and concrete slots for all of it, and only then writes; an exclusion
constraint on the slots is the second wall. The lease's escrow holds exactly what its window can cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import transaction

from marketplace.accounts.audit import record
from marketplace.accounts.models import Organisation
from marketplace.billing.services.metering import extend_meter, lock_meter, open_meter
from marketplace.core.clock import minute_of, minute_start
from marketplace.core.errors import Conflict, InvalidInput, NotFound
from marketplace.core.money import window_cost_uusd
from marketplace.fleet.models import Island
from marketplace.trading.models import ContractKind, Lease, LeasePurpose, LeaseState, Sku
from marketplace.trading.models import lease_id as new_lease_id
from marketplace.trading.positions import free_slots, lowest
from marketplace.trading.selectors import LIVE, has_shape, held_slots, steps_of
from marketplace.trading.services.locking import find_island, lock_lease, lock_sku, waiting_briefly
from marketplace.trading.services.trades import hold_slots, pay, source_of, stretch_slots, write_contract
from marketplace.trading.windows import (
    NOT_AVAILABLE,
    Window,
    check_extension,
    check_offered,
    check_price,
    check_size,
    free_in_words,
    snapped,
    whole_minutes_until,
)


@dataclass(frozen=True)
class Wish:
    """What a buyer asks for. `start_at` None: from the minute in progress. `lease_id` is the id the lease shall have,
    where the asking may be repeated: the same wish with it is one lease."""

    island_id: str
    gpus: int
    end_at: datetime
    start_at: datetime | None = None
    max_price_uusd_per_gpu_hour: int | None = None
    lease_id: str | None = None


def rent(
    organisation: Organisation,
    *,
    island_id: str,
    gpus: int,
    end_at: datetime,
    by: str,
    now: datetime,
    start_at: datetime | None = None,
    max_price_uusd_per_gpu_hour: int | None = None,
    purpose: str = LeasePurpose.RESERVE,
    job_ref: str = "",
    lease_id: str | None = None,
) -> Lease:
    """Rent GPUs of an island at its asked price. A reservation is paid from cash, a lease for a job from the escrow of
    that job, `job_ref`."""
    wish = Wish(island_id, gpus, end_at, start_at, max_price_uusd_per_gpu_hour, lease_id)
    return _rent(organisation, wish, purpose=purpose, job_ref=job_ref, by=by, now=now)


def _rent(
    organisation: Organisation, wish: Wish, *, purpose: str, job_ref: str, by: str, now: datetime, locked: bool = True
) -> Lease:
    """`locked` is True but in the test that proves the second wall to hold alone."""
    if (purpose == LeasePurpose.JOB) != bool(job_ref):
        raise InvalidInput.at("job_ref", "a lease for a job names the job, a reservation names none")
    with waiting_briefly(), transaction.atomic():
        island = find_island(wish.island_id, locked=locked)
        known = Lease.objects.filter(pk=wish.lease_id).first() if wish.lease_id else None
        if known is not None:
            return _replayed(known, organisation, wish)
        window = snapped(wish.start_at, wish.end_at, now)
        cost_uusd = check_size(island, wish.gpus, window)
        check_offered(island, window, now)
        check_price(island, wish.max_price_uusd_per_gpu_hour, "max_price_uusd_per_gpu_hour")
        sku = live_sku(island, now)
        if locked:
            lock_sku(sku.pk)
        lots = wish.gpus // sku.gpus_per_lot
        slots = free_slots(
            sku.lots, held_slots([island], window.start_min)[island.pk], window.start_min, window.end_min
        )
        _demand_free(sku, lots, slots, window)
        lease = Lease(
            id=wish.lease_id or new_lease_id(),
            organisation=organisation,
            seller=island.organisation,
            sku=sku,
            island=island,
            lots=lots,
            gpus=wish.gpus,
            purpose=purpose,
            job_ref=job_ref,
            price_uusd_per_gpu_hour=island.price_uusd_per_gpu_hour,
            start_min=window.start_min,
            end_min=window.end_min,
            created_by=by,
        )
        return book(lease, slots[:lots], cost_uusd, now)


def book(lease: Lease, slots: Sequence[int], cost_uusd: int, now: datetime) -> Lease:
    """Write a lease that was agreed: its contract, its slots, its money and its meter. Who books holds the island's row
    and the SKU's lock, and has seen that the slots are free."""
    lease.fee_bps = settings.MARKET_FEE_BPS
    lease.state = LeaseState.ACTIVE if lease.start_min <= minute_of(now) else LeaseState.PENDING
    lease.created_at = now
    lease.save(force_insert=True)
    kind = ContractKind.RENT if lease.upstream_id is None else ContractKind.RESALE
    write_contract(lease, kind, lease.start_min, lease.end_min, now)
    hold_slots(lease, slots)
    open_meter(
        lease.pk,
        buyer=lease.organisation,
        seller=lease.seller,
        escrow=pay(lease, cost_uusd, tranche=0),
        refund=source_of(lease),
        rate_uusd_per_gpu_hour=lease.price_uusd_per_gpu_hour,
        fee_bps=lease.fee_bps,
        gpus=lease.gpus,
        start_at=minute_start(lease.start_min),
        end_at=minute_start(lease.end_min),
        upstream=lease.upstream_id,
    )
    told = {"island": lease.island_id, "gpus": lease.gpus, "start_min": lease.start_min, "end_min": lease.end_min}
    record(
        lease.organisation, lease.created_by, "lease.rented", lease.pk, held_uusd=cost_uusd, job=lease.job_ref, **told
    )
    return lease


def extend(lease_id: str, *, end_at: datetime, by: str, now: datetime) -> Lease:
    """More minutes of the same slots at the lease's own price, while the island asks no more than that.

    The end it has already is no error, so a repeated call is harmless."""
    known = Lease.objects.filter(pk=lease_id).first()
    if known is None:
        raise NotFound("there is no such lease")
    with waiting_briefly(), transaction.atomic():
        island = find_island(known.island_id, locked=True)
        lock_sku(known.sku_id)
        lease = lock_lease(lease_id)
        end_min = whole_minutes_until(end_at)
        if end_min == lease.end_min:
            return lease
        if lease.state not in LIVE or lease.end_min <= minute_of(now):
            raise Conflict("this lease is over; rent anew", code="lease_over")
        check_extension(lease, island, end_min)
        more = Window(lease.end_min, end_min)
        busy = held_slots([island], more.start_min)[island.pk]
        free = set(free_slots(lease.sku.lots, busy, more.start_min, more.end_min))
        own = [slot for slot in set(lease.allocations.values_list("slot", flat=True)) if slot in free]
        _demand_free(lease.sku, lease.lots, own, more)
        cost_uusd = window_cost_uusd(lease.price_uusd_per_gpu_hour, lease.gpus, more.minutes)
        tranche = lease.contracts.filter(kind=ContractKind.EXTEND).count() + 1
        write_contract(lease, ContractKind.EXTEND, more.start_min, more.end_min, now)
        stretch_slots(lease, end_min)
        lock_meter(lease.pk)  # a sync that counts for it holds the meter when it asks for the accounts
        pay(lease, cost_uusd, tranche=tranche)
        extend_meter(lease.pk, minute_start(end_min))
        lease.end_min = end_min
        lease.save(update_fields=["end_min"])
        record(lease.organisation, by, "lease.extended", lease.pk, held_uusd=cost_uusd, end_min=end_min)
    return lease


def _replayed(known: Lease, organisation: Organisation, wish: Wish) -> Lease:
    asked = (organisation.pk, wish.island_id, wish.gpus)
    # Its end may have been moved since; an end that was asked for lies within what was bought.
    within = known.start_min < whole_minutes_until(wish.end_at) <= known.end_min
    if (known.organisation_id, known.island_id, known.gpus) != asked or not within:
        raise Conflict("this was already rented on other terms", code="changed_replay")
    return known


def live_sku(island: Island, now: datetime) -> Sku:
    """The island as it is, as an SKU. One whose machine has changed is retired, and what was sold of it stays sold."""
    sku = Sku.objects.filter(island=island, retired_at=None).first()
    if sku is not None and has_shape(sku, island):
        return sku
    if sku is not None:
        Sku.objects.filter(pk=sku.pk).update(retired_at=now)
    return Sku.objects.create(
        island=island,
        originator=island.organisation,
        gpu=island.gpu,
        gpus_per_lot=island.gpus_per_lot,
        lots=island.lots,
        created_at=now,
    )


def _demand_free(sku: Sku, lots: int, slots: Sequence[int], window: Window) -> None:
    """The positions say how many lots are unsold in every minute, the slots which could serve the window whole."""
    unsold = sku.lots + lowest(steps_of(sku, window.start_min, window.end_min), window.start_min, window.end_min)
    free = min(unsold, len(slots))
    if free < lots:
        raise Conflict.at("gpus", free_in_words(free * sku.gpus_per_lot), code=NOT_AVAILABLE)
