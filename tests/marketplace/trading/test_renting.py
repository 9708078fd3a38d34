from __future__ import annotations

from typing import Any

import pytest

from marketplace.accounts.models import AuditEvent, Organisation
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.models import LedgerAccount, Meter
from marketplace.billing.services.holds import escrow, hold
from marketplace.core.clock import minute_start
from marketplace.core.errors import Conflict, InsufficientFunds, InvalidInput, NotFound, Problem
from marketplace.fleet.models import Island, IslandState
from marketplace.trading import selectors
from marketplace.trading.models import Allocation, Contract, ContractKind, Lease, LeaseState, Position, Sku
from marketplace.trading.services import end_lease, extend, rent
from tests.marketplace.trading.market import (
    GPU_MINUTE,
    PRICE,
    START_MIN,
    USD,
    at,
    cash_uusd,
    for_job,
    funded,
    leased,
    make_island,
)

pytestmark = pytest.mark.django_db


def refusal(buyer: Organisation, island: Island, **asked: Any) -> Problem:
    wish: dict[str, Any] = {"island_id": island.pk, "gpus": 1, "end_at": at(60), "by": "test", "now": at(0)}
    with pytest.raises(Problem) as caught:
        rent(buyer, **{**wish, **asked})
    assert not Lease.objects.exists()
    assert cash_uusd(buyer) == 1_000 * USD
    return caught.value


def test_a_lease_holds_exactly_what_its_window_can_cost(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, gpus=3, end=90)

    assert balance_uusd(escrow(lease.pk, buyer)) == 3 * 90 * GPU_MINUTE
    assert cash_uusd(buyer) == 1_000 * USD - 3 * 90 * GPU_MINUTE
    meter = Meter.objects.get(pk=lease.pk)
    assert (meter.gpus, meter.rate_uusd_per_gpu_hour) == (3, PRICE)
    assert (meter.start_at, meter.end_at) == (at(0), at(90))
    assert lease.state == LeaseState.ACTIVE
    assert AuditEvent.objects.get(object_id=lease.pk).action == "lease.rented"


def test_now_is_the_minute_in_progress_and_an_end_inside_a_minute_holds_all_of_it(
    buyer: Organisation, island: Island
) -> None:
    lease = rent(buyer, island_id=island.pk, gpus=1, end_at=at(10.2), by="test", now=at(0.7))
    assert (lease.start_min, lease.end_min) == (START_MIN, START_MIN + 11)


def test_a_contract_is_two_positions_that_sum_to_zero(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, gpus=2)
    contract = Contract.objects.get(lease=lease)
    rows = Position.objects.filter(contract=contract).values_list("organisation_id", "delta_lots", "originated")
    assert sorted(rows) == sorted([(buyer.pk, 2, False), (island.organisation_id, -2, True)])


def test_a_seller_may_rent_from_itself(island: Island) -> None:
    seller = island.organisation
    other = funded("itself")
    hold_of = leased(other, make_island(owner=other), gpus=8)
    assert hold_of.seller == hold_of.organisation
    assert selectors.free_gpus(hold_of.island, START_MIN, START_MIN + 60) == 0
    assert seller != other


def test_a_lease_for_a_job_is_paid_from_the_job_and_gives_back_to_it(buyer: Organisation, island: Island) -> None:
    hold("job_1", buyer, 100 * USD)
    lease = for_job(buyer, island, "job_1", gpus=2, end=30)
    assert balance_uusd(escrow("job_1", buyer)) == 100 * USD - 60 * GPU_MINUTE
    end_lease(lease.pk, reason="released", by="scheduler", now=at(0))
    assert balance_uusd(escrow("job_1", buyer)) == 100 * USD
    assert cash_uusd(buyer) == 900 * USD


def test_a_job_cannot_rent_beyond_its_budget(buyer: Organisation, island: Island) -> None:
    hold("job_1", buyer, 59 * GPU_MINUTE)
    with pytest.raises(InsufficientFunds, match="budget"):
        for_job(buyer, island, "job_1", end=60)
    assert balance_uusd(escrow("job_1", buyer)) == 59 * GPU_MINUTE
    assert not Lease.objects.exists()


def test_without_the_money_nothing_is_rented(island: Island) -> None:
    poor = funded("poor", dollars=1)
    with pytest.raises(InsufficientFunds, match=r"holds \$2\.40, and \$1\.00 cash is free"):
        leased(poor, island)
    assert not Lease.objects.exists()
    assert not Allocation.objects.exists()
    assert cash_uusd(poor) == USD


@pytest.mark.parametrize(
    ("asked", "code", "field"),
    [
        ({"gpus": 0}, "invalid", "gpus"),
        ({"gpus": 9}, "invalid", "gpus"),
        ({"start_at": at(-1)}, "invalid", "start_at"),
        ({"start_at": at(600_000), "end_at": at(600_060)}, "invalid", "start_at"),
        ({"end_at": at(0)}, "invalid", "end_at"),
        ({"end_at": at(600_000)}, "invalid", "end_at"),
        ({"max_price_uusd_per_gpu_hour": PRICE - 60}, "price_changed", "max_price_uusd_per_gpu_hour"),
        ({"island_id": "isl_nothing"}, "not_found", "island_id"),
        ({"purpose": "job"}, "invalid", "job_ref"),
    ],
)
def test_a_refusal_names_the_field_and_changes_nothing(
    buyer: Organisation, island: Island, asked: dict[str, Any], code: str, field: str
) -> None:
    problem = refusal(buyer, island, **asked)
    assert (problem.code, [each.field for each in problem.fields]) == (code, [field])


@pytest.mark.parametrize(
    ("terms", "code", "field"),
    [
        ({"listed": False}, "not_available", "island_id"),
        ({"state": IslandState.RETIRED}, "not_available", "island_id"),
        ({"state": IslandState.SUSPECT}, "not_available", "island_id"),
        ({"state": IslandState.REGISTERED}, "not_available", "island_id"),
        ({"available_until": at(59)}, "not_available", "end_at"),
        ({"available_from": at(5)}, "not_available", "start_at"),
        ({"min_lease_min": 61}, "invalid", "end_at"),
        ({"gpus_per_lot": 4}, "invalid", "gpus"),
    ],
)
def test_the_islands_terms_are_kept(buyer: Organisation, terms: dict[str, Any], code: str, field: str) -> None:
    problem = refusal(buyer, make_island(**terms))
    assert (problem.code, [each.field for each in problem.fields]) == (code, [field])


def test_a_later_window_needs_no_agent_yet(buyer: Organisation) -> None:
    lease = leased(buyer, make_island(state=IslandState.REGISTERED), start=10)
    assert lease.state == LeaseState.PENDING


def test_what_is_free_is_what_can_be_rented(buyer: Organisation, island: Island) -> None:
    leased(buyer, island, gpus=5, start=30, end=60)
    leased(buyer, island, gpus=2, start=50, end=80)
    assert [selectors.free_gpus(island, START_MIN + a, START_MIN + b) for a, b in ((0, 30), (0, 31), (55, 56))] == [
        8,
        3,
        1,
    ]
    assert selectors.free_until_min(island, 8, START_MIN) == START_MIN + 30
    assert selectors.free_until_min(island, 2, START_MIN) == START_MIN + 50
    assert selectors.free_until_min(island, 1, START_MIN) is None
    assert selectors.free_until_min(island, 4, START_MIN + 40) == START_MIN + 40
    assert selectors.free_now([island], START_MIN)[island.pk] == selectors.Free(8, START_MIN + 30)
    with pytest.raises(Conflict, match="only 1 GPU is free") as caught:
        leased(buyer, island, gpus=2, start=40, end=60)
    assert caught.value.code == "not_available"
    leased(buyer, island, gpus=1, start=0, end=200)


def test_slots_that_are_free_one_after_the_other_are_not_one_gpu_for_the_window(buyer: Organisation) -> None:
    island = make_island(gpu_count=2)
    first = leased(buyer, island, gpus=2, start=0, end=10)
    assert first.lots == 2
    leased(buyer, island, gpus=1, start=10, end=20)
    leased(buyer, island, gpus=2, start=30, end=40)
    # One lot is unsold in every minute of [10, 30), and one slot is free for all of it.
    assert leased(buyer, island, gpus=1, start=10, end=30).allocations.get().slot == 1
    with pytest.raises(Conflict):
        leased(buyer, island, gpus=1, start=10, end=30)


def test_an_island_that_changed_is_another_sku_and_what_was_sold_stays_sold(
    buyer: Organisation, island: Island
) -> None:
    old = leased(buyer, island, gpus=1, end=60)
    Island.objects.filter(pk=island.pk).update(gpus_per_lot=8)
    island.refresh_from_db()
    assert selectors.free_gpus(island, START_MIN, START_MIN + 60) == 0
    with pytest.raises(Conflict, match="no GPU is free"):
        leased(buyer, island, gpus=8, end=30)
    new = leased(buyer, island, gpus=8, start=60, end=90)
    assert new.sku != old.sku
    assert Sku.objects.get(pk=old.sku_id).retired_at is not None
    with pytest.raises(Conflict, match="takes no more"):
        extend(old.pk, end_at=at(120), by="test", now=at(1))


def test_an_extension_takes_the_same_slots_and_holds_another_tranche(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, gpus=2, end=30)
    slots = set(lease.allocations.values_list("slot", flat=True))
    for end in (45, 60):
        lease = extend(lease.pk, end_at=at(end), by="test", now=at(10))
        assert lease.end_min == START_MIN + end
    assert balance_uusd(escrow(lease.pk, buyer)) == 2 * 60 * GPU_MINUTE
    assert Meter.objects.get(pk=lease.pk).end_at == at(60)
    assert set(lease.allocations.values_list("slot", "end_min")) == {(slot, START_MIN + 60) for slot in slots}
    kinds = selectors.contracts_of(lease).values_list("kind", "start_min", "end_min")
    assert [(kind, a - START_MIN, b - START_MIN) for kind, a, b in kinds] == [
        (ContractKind.RENT, 0, 30),
        (ContractKind.EXTEND, 30, 45),
        (ContractKind.EXTEND, 45, 60),
    ]


def test_an_extension_of_lots_pays_for_their_gpus_once(buyer: Organisation) -> None:
    lease = leased(buyer, make_island(gpu_count=16, gpus_per_lot=8), gpus=8, end=30)
    extend(lease.pk, end_at=at(60), by="test", now=at(10))
    assert cash_uusd(buyer) == 1_000 * USD - 8 * 60 * GPU_MINUTE


def test_a_repeated_extension_is_harmless(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, end=30)
    for _ in range(2):
        extend(lease.pk, end_at=at(60), by="test", now=at(10))
    assert cash_uusd(buyer) == 1_000 * USD - 60 * GPU_MINUTE
    assert Contract.objects.filter(kind=ContractKind.EXTEND).count() == 1


def test_an_extension_stops_at_the_next_holder_of_the_slot(buyer: Organisation) -> None:
    island = make_island(gpu_count=1)
    lease = leased(buyer, island, end=30)
    leased(buyer, island, start=40, end=50)
    assert selectors.extendable_until_min(lease) == START_MIN + 40
    with pytest.raises(Conflict, match="no GPU is free"):
        extend(lease.pk, end_at=at(41), by="test", now=at(10))
    extend(lease.pk, end_at=at(40), by="test", now=at(10))
    assert cash_uusd(buyer) == 1_000 * USD - 50 * GPU_MINUTE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"price_uusd_per_gpu_hour": PRICE + 60}, "price_changed"),
        ({"listed": False}, "not_available"),
        ({"state": IslandState.LOST}, "not_available"),
        ({"state": IslandState.DRAINING}, "not_available"),
        ({"available_until": at(50)}, "not_available"),
    ],
)
def test_an_extension_is_refused_where_renting_would_be(
    buyer: Organisation, island: Island, change: dict[str, Any], code: str
) -> None:
    lease = leased(buyer, island, end=30)
    Island.objects.filter(pk=island.pk).update(**change)
    with pytest.raises(Conflict) as caught:
        extend(lease.pk, end_at=at(60), by="test", now=at(10))
    assert caught.value.code == code
    lease = selectors.lease_for(buyer, lease.pk)
    assert selectors.extendable_until_min(lease) == START_MIN + (50 if "available_until" in change else 30)


def test_a_dearer_island_leaves_a_lease_its_price_and_a_cheaper_one_too(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, end=30)
    Island.objects.filter(pk=island.pk).update(price_uusd_per_gpu_hour=PRICE // 2)
    extend(lease.pk, end_at=at(60), by="test", now=at(10))
    assert cash_uusd(buyer) == 1_000 * USD - 60 * GPU_MINUTE


def test_a_lease_that_is_over_or_ended_is_not_extended(buyer: Organisation, island: Island) -> None:
    over, ended = leased(buyer, island, end=30), leased(buyer, island, end=60)
    end_lease(ended.pk, reason="released", by="test", now=at(5))
    for lease in (over, ended):
        with pytest.raises(Conflict) as caught:
            extend(lease.pk, end_at=at(90), by="test", now=at(30))
        assert caught.value.code == "lease_over"
    with pytest.raises(InvalidInput):
        extend(leased(buyer, island).pk, end_at=at(30), by="test", now=at(5))
    with pytest.raises(NotFound):
        extend("lse_nothing", end_at=at(90), by="test", now=at(0))


def test_an_extension_without_the_money_leaves_the_lease_as_it_was(island: Island) -> None:
    poor = funded("poor", dollars=2)
    lease = leased(poor, island, end=30)
    with pytest.raises(InsufficientFunds):
        extend(lease.pk, end_at=at(120), by="test", now=at(10))
    lease.refresh_from_db()
    assert lease.end_min == START_MIN + 30
    assert set(lease.allocations.values_list("end_min", flat=True)) == {START_MIN + 30}
    assert Meter.objects.get(pk=lease.pk).end_at == minute_start(lease.end_min)


def test_another_organisations_lease_looks_like_none(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island)
    with pytest.raises(NotFound):
        selectors.lease_for(funded("other"), lease.pk)
    assert list(selectors.leases_of(island.organisation)) == []
    assert LedgerAccount.objects.filter(ref=lease.pk).get().organisation == buyer
