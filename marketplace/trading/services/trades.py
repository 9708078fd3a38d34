"""What every trade is made of: a contract with its two positions, slots, and the money held for them.

Invariant: a contract and its positions are written together and sum to zero; what is held for a lease is held in the
escrow of its own name and comes from one place, where the rest goes back to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from django.db import IntegrityError, OperationalError, transaction
from django.db.models import F
from django.db.models.functions import Greatest

from marketplace.billing.models import LedgerAccount
from marketplace.billing.services.holds import cash, escrow, hold, hold_from
from marketplace.core.errors import Conflict, InsufficientFunds
from marketplace.core.money import format_usd
from marketplace.trading.models import Allocation, Contract, ContractKind, Lease, Position
from marketplace.trading.positions import held_pieces
from marketplace.trading.windows import NOT_AVAILABLE

DEADLOCK = "40P01"
SLOT_WALL = "no_slot_is_held_twice"


def write_contract(
    lease: Lease, kind: ContractKind, start_min: int, end_min: int, now: datetime, *, lots: int | None = None
) -> Contract:
    """Minutes of lots, all of the lease's where not said, from the seller to the buyer; or, given back, from the buyer
    to the originator, whoever they were bought of."""
    lots = lease.lots if lots is None else lots
    contract = Contract.objects.create(
        kind=kind,
        sku=lease.sku,
        lease=lease,
        lots=lots,
        start_min=start_min,
        end_min=end_min,
        price_uusd_per_gpu_hour=lease.price_uusd_per_gpu_hour,
        created_at=now,
    )
    back = kind == ContractKind.RELEASE
    other = lease.seller if not back else lease.sku.originator
    sides = (
        (lease.organisation, -lots if back else lots, False),
        (other, lots if back else -lots, back or lease.upstream_id is None),
    )
    Position.objects.bulk_create(
        Position(
            contract=contract,
            organisation=organisation,
            sku=lease.sku,
            start_min=start_min,
            end_min=end_min,
            delta_lots=delta_lots,
            originated=originated,
        )
        for organisation, delta_lots, originated in sides
    )
    return contract


def give_back(lease: Lease, from_min: int, now: datetime) -> None:
    """Minutes from `from_min` on that the lease still holds return to the originator; what it sold on is not its."""
    windows = lease.allocations.filter(end_min__gt=from_min).values_list("start_min", "end_min")
    for piece in held_pieces((max(start_min, from_min), end_min) for start_min, end_min in windows):
        write_contract(lease, ContractKind.RELEASE, piece.start_min, piece.end_min, now, lots=piece.delta)
    later = lease.allocations.filter(end_min__gt=from_min)
    later.update(end_min=Greatest("start_min", from_min))


def hold_slots(lease: Lease, slots: Sequence[int]) -> None:
    """Put the new lease on its slots. The database refuses one that is held, whoever forgot to lock."""
    rows = [
        Allocation(lease=lease, island_id=lease.island_id, slot=slot, start_min=lease.start_min, end_min=lease.end_min)
        for slot in sorted(slots)
    ]
    with _walled(), transaction.atomic():
        Allocation.objects.bulk_create(rows)


def stretch_slots(lease: Lease, end_min: int) -> None:
    """Hold the lease's slots for longer. One whose last minutes were sold on is held anew from the old end."""
    slots = set(lease.allocations.values_list("slot", flat=True))
    held_to_the_end = lease.allocations.filter(end_min=lease.end_min, start_min__lt=F("end_min"))
    cut = slots - set(held_to_the_end.values_list("slot", flat=True))
    with _walled(), transaction.atomic():
        held_to_the_end.update(end_min=end_min)
        Allocation.objects.bulk_create(
            Allocation(lease=lease, island_id=lease.island_id, slot=slot, start_min=lease.end_min, end_min=end_min)
            for slot in sorted(cut)
        )


def cut_slots(lease: Lease, slots: Sequence[int], start_min: int, end_min: int) -> None:
    """Take [start_min, end_min) of these slots away from the lease, which holds them for all of it."""
    for slot in sorted(slots):
        row = lease.allocations.filter(slot=slot, start_min__lte=start_min, end_min__gte=end_min).first()
        if row is None:
            raise _taken()
        after = (end_min, row.end_min)
        row.end_min = start_min
        row.save(update_fields=["end_min"])
        if after[0] < after[1]:
            Allocation.objects.create(
                lease=lease, island_id=lease.island_id, slot=slot, start_min=after[0], end_min=after[1]
            )


def source_of(lease: Lease) -> LedgerAccount:
    """Where the money of the lease comes from, and where the rest goes back to."""
    return escrow(lease.job_ref, lease.organisation) if lease.job_ref else cash(lease.organisation)


def pay(lease: Lease, amount_uusd: int, *, tranche: int) -> LedgerAccount:
    """Hold the cost of a contract in the lease's escrow; each contract of a lease is another tranche."""
    try:
        if lease.job_ref:
            return hold_from(lease.pk, lease.job_ref, lease.organisation, amount_uusd, tranche)
        return hold(lease.pk, lease.organisation, amount_uusd, tranche)
    except InsufficientFunds as error:
        have, whose = format_usd(source_of(lease).available_uusd), "of the job's budget" if lease.job_ref else "cash"
        raise InsufficientFunds(f"this holds {format_usd(amount_uusd)}, and {have} {whose} is free") from error


@contextmanager
def _walled() -> Iterator[None]:
    """The second wall's refusal as the answer the first one gives. Where nobody held the locks, two that stand at the
    wall together wait for each other, and the database refuses one of them as a deadlock: that is the wall as well."""
    try:
        yield
    except IntegrityError as error:
        if getattr(getattr(error.__cause__, "diag", None), "constraint_name", None) != SLOT_WALL:
            raise
        raise _taken() from error
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != DEADLOCK:
            raise
        raise _taken() from error


def _taken() -> Conflict:
    return Conflict.at("gpus", "these GPUs were taken a moment ago", code=NOT_AVAILABLE)
