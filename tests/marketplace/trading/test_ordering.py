"""Orders: what they hold, what they take, what stands, and what comes back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Organisation, Role
from marketplace.billing.invariants import breaches
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.services.holds import escrow
from marketplace.core.errors import Conflict, Forbidden, InsufficientFunds, InvalidInput, NotFound
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.models import Colocation, Contract, Lease, Order, OrderState, Tif
from marketplace.trading.orders import Wanted
from marketplace.trading.services import cancel_order, end_lease, place_order, preview_order, sweep_orders
from tests.marketplace.trading.market import PRICE, START_MIN, USD, at, cash_uusd, funded, leased, make_island

pytestmark = pytest.mark.django_db

HOUR = 60


@pytest.fixture
def buyer() -> Organisation:
    make_island(state=IslandState.RETIRED)  # the GPU is known, and nothing is for sale
    return funded("ada")


def actor(organisation: Organisation, role: str = Role.OWNER) -> Actor:
    return Actor(organisation, role, "user:1")


def wanted(gpus: int = 2, *, start: float | None = 0, end: float = 60, limit: int = PRICE, **more: Any) -> Wanted:
    """Of H100s, for [start, end) minutes after START."""
    start_at = None if start is None else at(start)
    where = {} if "island_id" in more else {"gpu": "h100-sxm-80g"}
    return Wanted(gpus=gpus, start_at=start_at, end_at=at(end), limit_uusd_per_gpu_hour=limit, **{**where, **more})


def place(organisation: Organisation, wish: Wanted, now: float = 0, key: str | None = None) -> Order:
    return place_order(actor(organisation), wish, at(now), key=key)


def held_uusd(order: Order) -> int:
    return balance_uusd(escrow(order.pk, order.organisation))


def windows(order: Order) -> list[tuple[int, int, int]]:
    """GPUs, from and to in minutes after START."""
    rows = order.leases.order_by("start_min", "id").values_list("gpus", "start_min", "end_min")
    return [(gpus, start - START_MIN, end - START_MIN) for gpus, start, end in rows]


def test_an_order_takes_the_cheapest_island_and_holds_no_more_than_the_lease_costs(buyer: Organisation) -> None:
    make_island(price_uusd_per_gpu_hour=2 * PRICE)
    cheap = make_island(price_uusd_per_gpu_hour=PRICE)
    order = place(buyer, wanted(limit=3 * PRICE))
    lease = order.leases.get()
    assert (order.state, lease.island, lease.gpus, lease.price_uusd_per_gpu_hour) == (
        OrderState.FILLED,
        cheap,
        2,
        PRICE,
    )
    assert cash_uusd(buyer) == 1_000 * USD - 2 * PRICE
    assert held_uusd(order) == 0
    assert Contract.objects.get(lease=lease).lots == 2
    assert breaches() == []


def test_an_order_that_finds_nothing_stands_with_its_money_held_and_is_filled_when_it_can_be(
    buyer: Organisation,
) -> None:
    island = make_island(state=IslandState.LOST)
    order = place(buyer, wanted(end=120))
    assert (order.state, held_uusd(order)) == (OrderState.OPEN, 4 * PRICE)
    assert sweep_orders(at(0.2)) == 0
    Island.objects.filter(pk=island.pk).update(state=IslandState.ONLINE)
    assert sweep_orders(at(0.5)) == 1
    order.refresh_from_db()
    assert (order.state, windows(order), held_uusd(order)) == (OrderState.FILLED, [(2, 0, 120)], 0)


def test_the_average_and_not_each_hour_is_within_the_limit(buyer: Organisation) -> None:
    """A cheap island until noon carries a dear one after it."""
    make_island(price_uusd_per_gpu_hour=PRICE // 2, available_until=at(180))
    make_island(price_uusd_per_gpu_hour=2 * PRICE)
    order = place(buyer, wanted(end=240, limit=PRICE, colocation=Colocation.ANY, tif=Tif.FOK))
    assert windows(order) == [(2, 0, 180), (2, 180, 240)]
    assert sum(lease.price_uusd_per_gpu_hour * (lease.end_min - lease.start_min) for lease in order.leases.all()) <= (
        240 * PRICE
    )
    assert place(buyer, wanted(end=240, limit=PRICE, tif=Tif.FOK)).state == OrderState.CANCELLED


def test_the_same_machines_are_the_same_slots_throughout(buyer: Organisation) -> None:
    island = make_island(gpu_count=2)
    other = funded("other")
    leased(other, island, gpus=1, start=0, end=60)
    leased(other, island, gpus=1, start=60, end=120)
    # Tightest fit: both lie on one slot, so the other is free throughout.
    assert place(buyer, wanted(1, end=120, colocation=Colocation.SAME_NODES)).state == OrderState.FILLED
    assert place(buyer, wanted(1, end=120, tif=Tif.IOC)).state == OrderState.CANCELLED


def test_part_of_an_order_is_taken_where_it_allows_and_the_rest_stands(buyer: Organisation) -> None:
    make_island(gpu_count=2)
    order = place(buyer, wanted(3, allow_partial_gpus=True, colocation=Colocation.ANY))
    assert (order.state, windows(order)) == (OrderState.OPEN, [(2, 0, 60)])
    assert order.wanted == [[1, START_MIN, START_MIN + 60, None]]
    assert held_uusd(order) == PRICE
    make_island()
    sweep_orders(at(0.5))
    order.refresh_from_db()
    assert (order.state, windows(order)) == (OrderState.FILLED, [(2, 0, 60), (1, 0, 60)])
    assert breaches() == []


def test_the_rest_of_an_order_for_one_island_is_of_the_same_island(buyer: Organisation) -> None:
    first = make_island(gpu_count=3)
    other = leased(funded("other"), first, gpus=1, start=0, end=60)
    order = place(buyer, wanted(3, allow_partial_gpus=True))
    assert order.wanted == [[1, START_MIN, START_MIN + 60, first.pk]]
    make_island()
    assert sweep_orders(at(0.2)) == 0
    end_lease(other.pk, reason="released", by="test", now=at(0))
    assert Order.objects.get(pk=order.pk).state == OrderState.OPEN  # the minute in progress stays sold


def test_a_block_that_got_fewer_gpus_is_over(buyer: Organisation) -> None:
    make_island(gpu_count=2)
    order = place(buyer, wanted(3, end=600, duration_min=60, allow_partial_gpus=True))
    assert (order.state, windows(order)) == (OrderState.CANCELLED, [(2, 0, 60)])
    assert order.reason == "the rest does not go with what it got"


def test_what_cannot_begin_in_time_is_closed_and_its_money_returned(buyer: Organisation) -> None:
    order = place(buyer, wanted(start=10, end=70))
    assert sweep_orders(at(9)) == 0
    assert sweep_orders(at(11)) == 1
    order.refresh_from_db()
    assert (order.state, "begin" in order.reason, cash_uusd(buyer)) == (OrderState.CANCELLED, True, 1_000 * USD)


def test_a_block_may_lie_anywhere_in_its_window(buyer: Organisation) -> None:
    island = make_island(gpu_count=2)
    leased(funded("other"), island, gpus=2, start=0, end=120)
    order = place(buyer, wanted(2, end=600, duration_min=120))
    assert windows(order) == [(2, 120, 240)]
    assert cash_uusd(buyer) == 1_000 * USD - 4 * PRICE


def test_a_basket_takes_its_quorum_over_islands_or_nothing(buyer: Organisation) -> None:
    """Two cheap GPUs here and two there carry a dear pair as far as the average allows."""
    make_island(gpu_count=2, price_uusd_per_gpu_hour=PRICE // 2)
    make_island(gpu_count=2, price_uusd_per_gpu_hour=PRICE)
    short = place(buyer, wanted(8, quorum_gpus=5, tif=Tif.IOC))
    assert (short.state, windows(short)) == (OrderState.CANCELLED, [])
    make_island(gpu_count=2, price_uusd_per_gpu_hour=2 * PRICE)
    order = place(buyer, wanted(8, quorum_gpus=3, min_gpus_per_island=2, limit=PRICE * 3 // 2))
    assert (order.state, order.reason) == (OrderState.FILLED, "its quorum is had, and what the limit bears above it")
    assert sorted(lease.price_uusd_per_gpu_hour for lease in order.leases.all()) == [PRICE // 2, PRICE, 2 * PRICE]
    assert held_uusd(order) == 0
    assert breaches() == []


def test_a_basket_that_is_not_to_be_had_stands(buyer: Organisation) -> None:
    order = place(buyer, wanted(4, quorum_gpus=4))
    assert (order.state, held_uusd(order)) == (OrderState.OPEN, 4 * PRICE)
    make_island(gpu_count=2)
    assert sweep_orders(at(0.2)) == 0
    make_island(gpu_count=2)
    assert sweep_orders(at(0.4)) == 1
    order.refresh_from_db()
    assert (order.state, windows(order)) == (OrderState.FILLED, [(2, 0, 60), (2, 0, 60)])


def test_a_block_that_waits_moves_no_money_while_it_does(buyer: Organisation) -> None:
    make_island(gpu_count=1)
    order = place(buyer, wanted(2, end=600, duration_min=60))
    assert [sweep_orders(at(minute)) for minute in (1, 2, 3)] == [0, 0, 0]
    order.refresh_from_db()
    assert (order.state, order.holds, held_uusd(order)) == (OrderState.OPEN, 1, 2 * PRICE)
    assert sweep_orders(at(541)) == 1  # no hour is left in its window
    assert cash_uusd(buyer) == 1_000 * USD


def test_immediate_orders_never_stand(buyer: Organisation) -> None:
    make_island(gpu_count=2)
    order = place(buyer, wanted(3, allow_partial_gpus=True, tif=Tif.IOC))
    assert (order.state, windows(order), held_uusd(order)) == (OrderState.CANCELLED, [(2, 0, 60)], 0)
    assert order.reason == "the rest could not be had at once"
    whole = place(buyer, wanted(1, tif=Tif.FOK))
    assert (whole.state, whole.reason) == (OrderState.CANCELLED, "nothing could be had at once")


def test_an_order_is_cancelled_once_and_what_it_held_comes_back(buyer: Organisation) -> None:
    order = place(buyer, wanted())
    assert cash_uusd(buyer) == 1_000 * USD - 2 * PRICE
    for _ in range(2):
        assert cancel_order(actor(buyer), order.pk, at(1)).state == OrderState.CANCELLED
    assert cash_uusd(buyer) == 1_000 * USD
    with pytest.raises(NotFound):
        cancel_order(actor(funded("other")), order.pk, at(1))


def test_cancelling_a_filled_order_changes_nothing(buyer: Organisation) -> None:
    make_island()
    order = place(buyer, wanted())
    assert cancel_order(actor(buyer), order.pk, at(1)).state == OrderState.FILLED
    assert order.leases.get().state == "active"


def test_an_order_expires(buyer: Organisation) -> None:
    order = place(buyer, wanted(start=600, end=660, expires_at=at(30)))
    sweep_orders(at(29))
    assert Order.objects.get().state == OrderState.OPEN
    sweep_orders(at(30))
    order.refresh_from_db()
    assert (order.state, order.reason, cash_uusd(buyer)) == (OrderState.CANCELLED, "its time ran out", 1_000 * USD)


def test_an_order_that_cannot_be_paid_leaves_nothing(buyer: Organisation) -> None:
    make_island()
    with pytest.raises(InsufficientFunds, match="cash is free"):
        place(buyer, wanted(8, end=60 * 24 * 30))
    assert not Order.objects.exists()
    assert not Lease.objects.exists()
    assert cash_uusd(buyer) == 1_000 * USD


def test_the_same_key_is_one_order(buyer: Organisation) -> None:
    first, again = (place(buyer, wanted(), key="ord_mine") for _ in range(2))
    assert first.pk == again.pk
    assert Order.objects.count() == 1
    with pytest.raises(Conflict, match="used for another order"):
        place(funded("other"), wanted(), key="ord_mine")


def test_a_preview_says_what_placing_would_do_and_writes_nothing(buyer: Organisation) -> None:
    make_island(price_uusd_per_gpu_hour=PRICE // 2, available_until=at(60))
    make_island(price_uusd_per_gpu_hour=PRICE)
    wish = wanted(end=120, limit=PRICE, colocation=Colocation.ANY)
    seen = preview_order(actor(buyer, Role.VIEWER), wish, at(0))
    assert seen.cost_uusd == 2 * PRICE // 2 + 2 * PRICE
    assert seen.held_uusd == 4 * PRICE
    assert seen.average_uusd_per_gpu_hour == PRICE * 3 // 4
    assert not Order.objects.exists()
    order = place(buyer, wish)
    assert cash_uusd(buyer) == 1_000 * USD - seen.cost_uusd
    assert order.leases.count() == len(seen.plan.lots)


def test_an_island_is_not_taken_for_less_than_its_shortest_lease(buyer: Organisation) -> None:
    make_island(price_uusd_per_gpu_hour=PRICE // 2, min_lease_min=120)
    dear = make_island()
    assert place(buyer, wanted(end=60)).leases.get().island == dear


def test_nobody_takes_of_their_own_islands() -> None:
    owner = funded("owner")
    island = make_island(owner)
    assert place(owner, wanted()).state == OrderState.OPEN
    with pytest.raises(InvalidInput, match="your own"):
        place(owner, wanted(gpu=None, island_id=island.pk))


def test_minutes_given_back_are_taken_by_the_order_that_waits(buyer: Organisation) -> None:
    island = make_island(gpu_count=1)
    other = leased(funded("other"), island, gpus=1, start=0, end=240)
    order = place(buyer, wanted(1, start=60, end=180))
    assert order.state == OrderState.OPEN
    end_lease(other.pk, reason="released", by="test", now=at(10))
    sweep_orders(at(11))
    assert windows(order) == [(1, 60, 180)]


def test_who_bids_more_is_filled_first(buyer: Organisation) -> None:
    rival = funded("rival")
    low, high = place(buyer, wanted(8)), place(rival, wanted(8, limit=2 * PRICE))
    make_island()
    sweep_orders(at(0.5))
    assert [Order.objects.get(pk=each.pk).state for each in (low, high)] == [OrderState.OPEN, OrderState.FILLED]


def test_bids_below_the_market_cost_a_sweep_two_queries_however_many_stand(
    buyer: Organisation, django_assert_max_num_queries: Any
) -> None:
    make_island()
    for _ in range(5):
        place(buyer, wanted(start=600, end=660, limit=PRICE // 2))
    with django_assert_max_num_queries(2):
        assert sweep_orders(at(1)) == 0


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"gpus": 0}, "gpus"),
        ({"limit": 61}, "limit_uusd_per_gpu_hour"),
        ({"gpu": "h900"}, "gpu"),
        ({"gpu": None}, "island_id"),
        ({"island_id": "isl_x", "gpu": None}, "island_id"),
        ({"end": -60}, "end_at"),
        ({"tif": "day"}, "tif"),
        ({"tif": "fok", "allow_partial_gpus": True}, "tif"),
        ({"colocation": "moon"}, "colocation"),
        ({"duration_min": 61}, "duration_min"),
        ({"duration_min": 30, "allow_partial_time": True}, "duration_min"),
        ({"min_block_min": 0}, "min_block_min"),
        ({"expires_at": at(0) - timedelta(minutes=1)}, "expires_at"),
        ({"gpus": 3, "gpus_per_lot": 2}, "gpus"),
        ({"quorum_gpus": 3}, "quorum_gpus"),
        ({"quorum_gpus": 1, "min_gpus_per_island": 3}, "min_gpus_per_island"),
        ({"quorum_gpus": 1, "allow_partial_gpus": True}, "quorum_gpus"),
        ({"min_gpus_per_island": 1}, "min_gpus_per_island"),
    ],
)
def test_each_mistake_is_named_by_its_field(buyer: Organisation, more: dict[str, Any], field: str) -> None:
    make_island()
    gpus = more.pop("gpus", 2)
    with pytest.raises(InvalidInput) as caught:
        place(buyer, wanted(gpus, **more))
    assert [problem.field for problem in caught.value.fields] == [field]
    assert not Order.objects.exists()


def test_who_may_only_look_places_and_cancels_nothing(buyer: Organisation) -> None:
    order = place(buyer, wanted())
    viewer = actor(buyer, Role.VIEWER)
    with pytest.raises(Forbidden):
        place_order(viewer, wanted(), at(0))
    with pytest.raises(Forbidden):
        cancel_order(viewer, order.pk, at(0))
