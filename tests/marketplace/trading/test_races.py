"""Buyers at once, in real transactions: the last GPU is sold once, and nobody else is out of any money."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, transaction

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Organisation, Role
from marketplace.billing.models import AccountKind, LedgerAccount, Meter
from marketplace.billing.services.metering import observe_beat, report_usage
from marketplace.core.errors import Busy, Conflict, Problem
from marketplace.fleet.models import Island
from marketplace.trading.models import Allocation, Contract, Lease, LeasePurpose
from marketplace.trading.orders import Wanted
from marketplace.trading.services import end_lease, extend, place_order
from marketplace.trading.services.renting import Wish, _rent
from marketplace.trading.services.trades import SLOT_WALL
from tests.marketplace.trading.market import GPU_MINUTE, USD, at, cash_uusd, funded, leased, make_island
from tests.servers import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def rent_once(buyer: Organisation, island: Island, *, locked: bool) -> Lease | Problem:
    wish = Wish(island.pk, 1, at(60))
    try:
        return _rent(buyer, wish, purpose=LeasePurpose.RESERVE, job_ref="", by="test", now=at(0), locked=locked)
    except Problem as problem:
        return problem
    finally:
        connection.close()


def rent_as_a_person_would(buyer: Organisation, island: Island) -> Lease | Problem:
    """Told to try again, tries again."""
    while isinstance(outcome := rent_once(buyer, island, locked=True), Busy):
        continue
    return outcome


def at_once(act: Callable[[Organisation], Lease | Problem], buyers: list[Organisation]) -> list[Lease | Problem]:
    gate = threading.Barrier(len(buyers))

    def run(buyer: Organisation) -> Lease | Problem:
        gate.wait(timeout=60)
        return act(buyer)

    with ThreadPoolExecutor(len(buyers)) as pool:
        return list(pool.map(run, buyers))


def one_won(buyers: list[Organisation], outcomes: list[Lease | Problem]) -> list[Problem]:
    """The refusals, after the proof that one was sold and the others are as they were."""
    (won,) = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    for buyer in buyers:
        assert cash_uusd(buyer) == 1_000 * USD - (60 * GPU_MINUTE if buyer == won.organisation else 0)
    held = [row for row in LedgerAccount.objects.filter(kind=AccountKind.ESCROW) if row.balance_uusd]
    assert {(row.ref, row.organisation_id) for row in held} == {(won.pk, won.organisation_id)}
    assert [Lease.objects.get().pk, Meter.objects.get().pk, Allocation.objects.get().lease_id] == [won.pk] * 3
    assert Contract.objects.count() == 1
    refused = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    assert {(type(problem), problem.code) for problem in refused} <= {(Conflict, "not_available")}
    return refused


def test_fifty_buyers_of_the_last_gpu_and_one_wins() -> None:
    island = make_island(gpu_count=1)
    buyers = [funded(f"buyer {number}") for number in range(50)]
    outcomes = at_once(lambda buyer: rent_as_a_person_would(buyer, island), buyers)
    assert len(one_won(buyers, outcomes)) == 49


def all_at_the_door(island: Island, buyers: list[Organisation], *, locked: bool, waiting: int) -> list[Lease | Problem]:
    """Let them rent, with the door to the slots held shut until `waiting` of them stand at it."""
    with ThreadPoolExecutor(len(buyers)) as pool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("LOCK TABLE trading_allocation IN SHARE MODE")
            pending = [pool.submit(rent_once, buyer, island, locked=locked) for buyer in buyers]
            standing = 0
            while standing < waiting:
                cursor.execute(
                    "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'trading_allocation'::regclass"
                )
                (standing,) = cursor.fetchone()
            assert standing == waiting
        return [future.result(timeout=60) for future in pending]


def test_with_neither_locks_nor_constraint_the_race_does_happen() -> None:
    """The control: if the last GPU is not sold twice here, the tests beside this one prove nothing."""
    island = make_island(gpu_count=1)
    cancelled = leased(funded("first"), island, start=100, end=101)
    end_lease(cancelled.pk, reason="cancelled", by="test", now=at(0))
    buyers = [funded(f"buyer {number}") for number in range(4)]
    wall = next(each for each in Allocation._meta.constraints if each.name == SLOT_WALL)
    with connection.schema_editor() as editor:
        editor.remove_constraint(Allocation, wall)
    try:
        outcomes = all_at_the_door(island, buyers, locked=False, waiting=len(buyers))
        rented = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
        assert len(rented) > 1
    finally:
        Allocation.objects.all().delete()
        with connection.schema_editor() as editor:
            editor.add_constraint(Allocation, wall)


@pytest.mark.parametrize("locked", [True, False])
def test_the_constraint_refuses_what_the_locks_let_through(locked: bool) -> None:
    """Every buyer reads the GPU as free, then all write: the door to the slots is held shut until they stand at it.

    With the locks, one stands there and the others wait for the island's row; without, all do and the exclusion
    constraint is what lets one through."""
    island = make_island(gpu_count=1)
    # The SKU is there already, so that its making does not serialise the buyers.
    cancelled = leased(funded("first"), island, start=100, end=101)
    end_lease(cancelled.pk, reason="cancelled", by="test", now=at(0))
    buyers = [funded(f"buyer {number}") for number in range(4)]
    outcomes = all_at_the_door(island, buyers, locked=locked, waiting=1 if locked else len(buyers))
    rented = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    assert len(rented) == 1
    assert {problem.code for problem in refused} == {"not_available"}
    by_the_wall = [problem for problem in refused if "taken a moment ago" in problem.fields[0].message]
    assert len(by_the_wall) == (0 if locked else len(buyers) - 1)
    for buyer in buyers:
        assert cash_uusd(buyer) == 1_000 * USD - (60 * GPU_MINUTE if buyer == rented[0].organisation else 0)


def test_an_extension_and_a_sync_that_counts_for_the_same_lease_do_not_stop_each_other() -> None:
    """A sync holds the meter when it posts what was counted; so an extension asks for the meter before it pays."""
    buyer = funded("buyer")
    lease = leased(buyer, make_island(), end=30)
    observe_beat(lease.pk, at(0))

    def extension() -> Lease:
        try:
            return extend(lease.pk, end_at=at(60), by="test", now=at(1))
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            observe_beat(lease.pk, at(1))
            extended = pool.submit(extension)
            wait_until(somebody_waits, limit_s=10, what="the extension waits for the meter")
            report_usage(lease.pk, 1, 60_000)
        assert extended.result().end_min == lease.end_min + 30
    assert cash_uusd(buyer) == 1_000 * USD - 60 * GPU_MINUTE
    assert Meter.objects.get().charged_uusd == GPU_MINUTE


def somebody_waits() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        return bool(cursor.fetchone()[0])


def test_orders_that_want_the_last_gpus_at_once_get_each_once(transactional_db: None) -> None:
    """Twelve buyers with orders for two of eight GPUs: four are filled, and nobody holds a GPU another holds."""
    make_island(gpu_count=8)
    buyers = [funded(f"buyer {number}") for number in range(12)]

    def order(buyer: Organisation) -> Lease | Problem:
        wish = Wanted(
            gpus=2, gpu="h100-sxm-80g", start_at=at(0), end_at=at(60), limit_uusd_per_gpu_hour=GPU_MINUTE * 60
        )
        try:
            while True:
                try:
                    placed = place_order(Actor(buyer, Role.OWNER, "user:1"), wish, at(0))
                except Busy:
                    continue
                return placed.leases.first() or Conflict("it stands", code=placed.state)
        finally:
            connection.close()

    outcomes = at_once(order, buyers)
    won = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    assert sum(lease.gpus for lease in won) == 8
    assert {outcome.code for outcome in outcomes if isinstance(outcome, Problem)} == {"open"}
    slots = list(Allocation.objects.values_list("slot", flat=True))
    assert sorted(slots) == list(range(8))
    for buyer in buyers:
        assert cash_uusd(buyer) == 1_000 * USD - 2 * 60 * GPU_MINUTE
