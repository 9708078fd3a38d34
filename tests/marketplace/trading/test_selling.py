"""Selling on: a part of a lease for sale, bought, served, paid for on both legs, and ended."""

from __future__ import annotations

import pytest
from django.db.models import Sum

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Organisation, Role
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.models import AccountKind, LedgerAccount, Meter
from marketplace.core.errors import Conflict, InvalidInput, NotFound
from marketplace.fleet import hooks
from marketplace.fleet.models import Island
from marketplace.trading.models import ContractKind, Lease, LeaseState, Order, OrderState, Position
from marketplace.trading.orders import Wanted
from marketplace.trading.selectors import pieces_of, sellable_slots
from marketplace.trading.services import (
    Offer,
    cancel_order,
    end_lease,
    extend,
    place_order,
    place_sale,
    preview_sale,
    sweep_leases,
    sweep_orders,
)
from marketplace.trading.services.serving import reservations
from tests.marketplace.trading.market import (
    GPU_MINUTE,
    PRICE,
    START_MIN,
    at,
    cash_uusd,
    charge_counted,
    funded,
    leased,
    make_agent,
)
from worker_agent.protocol import UsageRecord

LOW = PRICE // 2
pytestmark = pytest.mark.django_db


def acting(organisation: Organisation) -> Actor:
    return Actor(organisation, Role.OWNER, "test")


def on_sale(lease: Lease, gpus: int, start: float | None, end: float | None, price: int = LOW, **more: int) -> Order:
    offer = Offer(
        lease.pk,
        gpus,
        price,
        None if start is None else at(start),
        None if end is None else at(end),
        min_block_min=more.get("block", 1),
    )
    return place_sale(acting(lease.organisation), offer, at(more.get("now", 0)))


def bid(
    buyer: Organisation, island: Island, gpus: int, start: float, end: float, limit: int = LOW, now: float = 0
) -> Order:
    wish = Wanted(
        gpus=gpus,
        island_id=island.pk,
        start_at=at(start),
        end_at=at(end),
        limit_uusd_per_gpu_hour=limit,
        min_block_min=1,
    )
    return place_order(acting(buyer), wish, at(now))


def lots_of(organisation: Organisation, minute: int) -> int:
    here = Position.objects.filter(
        organisation=organisation, start_min__lte=START_MIN + minute, end_min__gt=START_MIN + minute, originated=False
    )
    return here.aggregate(total=Sum("delta_lots"))["total"] or 0


@pytest.fixture
def other(db: None) -> Organisation:
    return funded("other")


def test_a_part_that_is_bought_is_the_buyers_and_the_rest_stays_the_holders(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=4, end=240)
    sale = on_sale(lease, gpus=2, start=60, end=180)

    order = bid(other, island, gpus=2, start=60, end=180)

    assert order.state == OrderState.FILLED
    sale.refresh_from_db()
    assert (sale.state, sale.offered) == (OrderState.FILLED, [])
    bought = order.leases.get()
    assert (bought.seller, bought.upstream, bought.sale) == (buyer, lease, sale)
    assert bought.price_uusd_per_gpu_hour == LOW
    assert bought.contracts.get().kind == ContractKind.RESALE
    assert [lots_of(buyer, minute) for minute in (0, 60, 179, 180)] == [4, 2, 2, 4]
    assert [lots_of(other, minute) for minute in (59, 60, 179, 180)] == [0, 2, 2, 0]
    assert cash_uusd(other) == 1_000_000_000 - 2 * 120 * LOW // 60


def test_who_sells_on_is_paid_what_is_delivered_and_pays_for_it_what_they_agreed(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=1, end=60)
    agent = make_agent(island)
    on_sale(lease, gpus=1, start=20, end=60)
    bought = bid(other, island, gpus=1, start=20, end=60).leases.get()

    for minute in range(61):
        hooks.observe_beat(agent, at(minute))
    sweep_leases(at(20))
    served = [
        UsageRecord(seq=1, assignment_id=lease.pk, gpu_ms_total=20 * 60_000, observed_at_ms=0),
        UsageRecord(seq=2, assignment_id=bought.pk, gpu_ms_total=30 * 60_000, observed_at_ms=0),
    ]
    hooks.take_usage(agent, served, at(60))
    sweep_leases(at(60))
    sweep_leases(at(63))
    sweep_leases(at(63))

    first, second = Meter.objects.get(pk=lease.pk), Meter.objects.get(pk=bought.pk)
    assert second.charged_uusd == 30 * LOW // 60
    assert first.charged_uusd == 50 * GPU_MINUTE
    earned = LedgerAccount.objects.get(kind=AccountKind.SELLER_ACCRUED, organisation=buyer)
    assert balance_uusd(earned) == second.charged_uusd - second.fee_uusd
    assert cash_uusd(other) == 1_000_000_000 - second.charged_uusd
    assert cash_uusd(buyer) == 1_000_000_000 - first.charged_uusd
    assert not Lease.objects.filter(settled_at=None).exists()


def test_the_agent_serves_what_is_still_held_piece_by_piece(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=4, end=240)
    on_sale(lease, gpus=3, start=60, end=120)
    bought = bid(other, island, gpus=3, start=60, end=120).leases.get()

    assert [(piece.id, piece.lots) for piece in pieces_of([lease])[lease.pk]] == [
        (lease.pk, 4),
        (f"{lease.pk}.{START_MIN + 60}", 1),
        (f"{lease.pk}.{START_MIN + 120}", 4),
    ]
    assert [(each.id, each.gpus) for each in reservations(island, at(0))] == [(lease.pk, 4)]
    assert {(each.id, each.gpus) for each in reservations(island, at(70))} == {
        (f"{lease.pk}.{START_MIN + 60}", 1),
        (bought.pk, 3),
    }


def test_a_counter_of_a_lease_that_was_cut_counts_no_more_than_its_piece(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=1, end=60)
    agent = make_agent(island)
    on_sale(lease, gpus=1, start=20, end=60)
    bid(other, island, gpus=1, start=20, end=60)
    for minute in range(61):
        hooks.observe_beat(agent, at(minute))

    charge_counted(agent, lease, 10**9, at(60))

    assert Meter.objects.get(pk=lease.pk).billable_gpu_ms == 20 * 60_000


def test_a_holder_who_gives_the_rest_back_goes_on_paying_for_what_was_sold_on(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=2, end=60)
    agent = make_agent(island)
    on_sale(lease, gpus=1, start=20, end=60)
    bought = bid(other, island, gpus=1, start=20, end=60).leases.get()
    hooks.observe_beat(agent, at(0))

    end_lease(lease.pk, reason="released", by="test", now=at(10))
    sweep_leases(at(20))
    for minute in range(1, 61):
        hooks.observe_beat(agent, at(minute))
    charge_counted(agent, bought, 40 * 60_000, at(60))

    lease.refresh_from_db()
    assert lease.settled_at is None
    assert [lots_of(buyer, minute) for minute in (5, 10, 30)] == [2, 0, 0]
    assert lots_of(other, 30) == 1
    assert Meter.objects.get(pk=lease.pk).charged_uusd == 40 * GPU_MINUTE
    for minute in (60, 64, 64):
        sweep_leases(at(minute))
    assert not Lease.objects.filter(settled_at=None).exists()
    assert cash_uusd(buyer) == 1_000_000_000 - 40 * GPU_MINUTE


def test_minutes_that_a_buyer_of_a_part_gives_back_are_the_islands_again(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=8, end=240)
    on_sale(lease, gpus=8, start=60, end=240)
    bought = bid(other, island, gpus=8, start=60, end=240).leases.get()

    end_lease(bought.pk, reason="released", by="test", now=at(100))

    bought.refresh_from_db()
    assert bought.state == LeaseState.ENDED
    assert leased(funded("third"), island, gpus=8, start=120, end=200, now=100).gpus == 8


def test_what_was_bought_of_a_holder_can_be_sold_on_again_and_every_leg_is_paid(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    third = funded("third")
    lease = leased(buyer, island, gpus=1, end=120)
    agent = make_agent(island)
    on_sale(lease, gpus=1, start=20, end=120)
    second = bid(other, island, gpus=1, start=20, end=120).leases.get()
    on_sale(second, gpus=1, start=60, end=120, price=LOW // 2 // 60 * 60)
    last = bid(third, island, gpus=1, start=60, end=120).leases.get()

    for minute in range(121):
        hooks.observe_beat(agent, at(minute))
        sweep_leases(at(minute))
    served = [
        UsageRecord(seq=n, assignment_id=key, gpu_ms_total=minutes * 60_000, observed_at_ms=0)
        for n, (key, minutes) in enumerate(((lease.pk, 20), (second.pk, 40), (last.pk, 60)))
    ]
    hooks.take_usage(agent, served, at(120))
    for _ in range(4):
        sweep_leases(at(130))

    charged = {meter.pk: meter.charged_uusd for meter in Meter.objects.all()}
    assert charged[lease.pk] == 120 * GPU_MINUTE
    assert charged[second.pk] == 100 * LOW // 60
    assert charged[last.pk] == 60 * last.price_uusd_per_gpu_hour // 60
    assert not Lease.objects.filter(settled_at=None).exists()


def test_a_bid_that_stood_before_the_sale_pays_up_to_its_limit(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    Island.objects.update(price_uusd_per_gpu_hour=PRICE)
    standing = bid(other, island, gpus=1, start=60, end=120, limit=PRICE - 600)
    lease = leased(buyer, island, gpus=8, end=240)
    on_sale(lease, gpus=1, start=60, end=120, price=LOW, now=1)

    sweep_orders(at(1))

    standing.refresh_from_db()
    assert standing.state == OrderState.FILLED
    assert standing.leases.get().price_uusd_per_gpu_hour == PRICE - 600


def test_the_cheaper_of_the_islands_price_and_a_holders_is_taken(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=4, end=240)
    on_sale(lease, gpus=2, start=60, end=120, price=LOW)

    order = bid(other, island, gpus=4, start=60, end=120, limit=PRICE)

    prices = sorted((each.price_uusd_per_gpu_hour, each.gpus) for each in order.leases.all())
    assert prices == [(LOW, 2), (PRICE, 2)]


def test_nothing_is_sold_twice_nor_what_is_not_held(island: Island, buyer: Organisation, other: Organisation) -> None:
    lease = leased(buyer, island, gpus=2, end=240)
    on_sale(lease, gpus=2, start=60, end=120)

    with pytest.raises(Conflict) as twice:
        on_sale(lease, gpus=1, start=90, end=150)
    assert twice.value.fields[0].field == "gpus"
    assert on_sale(lease, gpus=2, start=120, end=240).state == OrderState.OPEN
    assert sellable_slots(lease, START_MIN + 60, START_MIN + 70) == []

    bid(other, island, gpus=2, start=60, end=120)
    with pytest.raises(Conflict):
        on_sale(lease, gpus=1, start=60, end=90)


@pytest.mark.parametrize(
    ("field", "gpus", "start", "end", "price", "block"),
    [
        ("gpus", 3, 60, 120, LOW, 1),
        ("gpus", 0, 60, 120, LOW, 1),
        ("limit_uusd_per_gpu_hour", 1, 60, 120, 61, 1),
        ("limit_uusd_per_gpu_hour", 1, 60, 120, 0, 1),
        ("start_at", 1, 5, 120, LOW, 1),
        ("end_at", 1, 60, 241, LOW, 1),
        ("end_at", 1, 60, 60, LOW, 1),
        ("min_block_min", 1, 60, 120, LOW, 61),
    ],
)
def test_an_offer_that_cannot_be_is_refused_at_its_field(
    island: Island, buyer: Organisation, field: str, gpus: int, start: int, end: int, price: int, block: int
) -> None:
    lease = leased(buyer, island, gpus=2, end=240)
    with pytest.raises(InvalidInput) as refused:
        on_sale(lease, gpus, start, end, price, block=block)
    assert field in [problem.field for problem in refused.value.fields]
    assert not Order.objects.exists()


def test_anothers_lease_is_not_there_to_be_sold(island: Island, buyer: Organisation, other: Organisation) -> None:
    lease = leased(buyer, island)
    with pytest.raises(NotFound):
        place_sale(acting(other), Offer(lease.pk, 1, LOW), at(0))


def test_a_part_shorter_than_the_holder_sells_is_not_bought_nor_left(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=8, end=240)
    sale = on_sale(lease, gpus=1, start=60, end=180, block=60)

    assert bid(other, island, gpus=1, start=60, end=90).state == OrderState.OPEN
    assert bid(other, island, gpus=1, start=60, end=150).state == OrderState.OPEN
    assert bid(other, island, gpus=1, start=60, end=120).state == OrderState.FILLED
    sale.refresh_from_db()
    assert [row[1:] for row in sale.offered] == [[START_MIN + 120, START_MIN + 180]]


def test_a_sale_ends_with_its_lease_with_its_time_and_when_it_is_taken_back(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=3, end=240)
    first, second = on_sale(lease, 1, 60, 120), on_sale(lease, 1, 60, 120)
    third = on_sale(lease, 1, 180, 240)

    assert cancel_order(acting(buyer), first.pk, at(1)).state == OrderState.CANCELLED
    sweep_orders(at(115))
    end_lease(lease.pk, reason="released", by="test", now=at(130))

    for sale, why in ((second, "nobody bought"), (third, "the lease ended")):
        sale.refresh_from_db()
        assert (sale.state, sale.offered) == (OrderState.CANCELLED, [])
        assert why in sale.reason
    assert bid(other, island, gpus=1, start=200, end=230, now=131).state == OrderState.OPEN


def test_a_preview_says_what_it_brings_and_writes_nothing(island: Island, buyer: Organisation) -> None:
    lease = leased(buyer, island, gpus=2, end=240)
    seen = preview_sale(acting(buyer), Offer(lease.pk, 2, LOW, at(60), at(120)), at(0))
    assert seen.gross_uusd == 2 * 60 * LOW // 60
    assert 0 < seen.fee_uusd < seen.gross_uusd
    assert seen.paying_uusd == 2 * 60 * GPU_MINUTE
    assert not Order.objects.exists()


def test_a_lease_whose_tail_was_sold_can_be_extended_beyond_it_and_what_was_bought_of_it_cannot(
    island: Island, buyer: Organisation, other: Organisation
) -> None:
    lease = leased(buyer, island, gpus=8, end=120)
    on_sale(lease, gpus=8, start=60, end=120)
    bought = bid(other, island, gpus=8, start=60, end=120).leases.get()

    with pytest.raises(Conflict):
        extend(bought.pk, end_at=at(180), by="test", now=at(0))
    extend(lease.pk, end_at=at(180), by="test", now=at(0))

    assert [lots_of(buyer, minute) for minute in (0, 59, 60, 119, 120, 179)] == [8, 8, 0, 0, 8, 8]
