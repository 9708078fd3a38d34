"""Any sequence of renting, extending, ending, bidding, beats and sweeps, against a grid of minutes and GPUs that a
child could check."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role
from marketplace.billing.invariants import breaches
from marketplace.billing.models import LedgerAccount, Meter
from marketplace.billing.services.holds import cash, hold
from marketplace.billing.services.ticking import capture_due
from marketplace.core.errors import Conflict, InsufficientFunds, InvalidInput
from marketplace.fleet import hooks
from marketplace.fleet.models import Island
from marketplace.trading import selectors
from marketplace.trading.models import (
    LEASE_MACHINE,
    Allocation,
    Colocation,
    Contract,
    ContractKind,
    Lease,
    LeasePurpose,
    Order,
    OrderState,
    Position,
    Side,
    Tif,
)
from marketplace.trading.orders import Wanted
from marketplace.trading.services import (
    Offer,
    cancel_order,
    end_lease,
    extend,
    most_uusd,
    place_order,
    place_sale,
    rent,
    sweep_leases,
    sweep_orders,
)
from tests.machines import RolledBack
from tests.marketplace.trading.market import PRICE, START_MIN, USD, at, funded, make_agent, make_island
from worker_agent.protocol import UsageRecord

GPUS = 3
HORIZON = 60
DOLLARS = 20


FIRED: Counter[str] = Counter()


class Market(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.island = make_island(gpu_count=GPUS)
        self.agent = make_agent(self.island)
        self.buyers = [funded(name, DOLLARS) for name in ("one", "two")]
        hold("job_1", self.buyers[1], 2 * USD)
        self.minute = 0.0
        self.sold: dict[str, Counter[int]] = {}  # by lease: the GPUs it holds in each minute
        self.gpus: dict[str, int] = {}  # as they were bought
        self.sold_on: Counter[tuple[str, int]] = Counter()  # by lease and minute
        self.seq = 0
        # Something that can be sold on is there from the first.
        rent(self.buyers[0], island_id=self.island.pk, gpus=2, end_at=at(45), by="t", now=at(0))
        self.notice_fills()

    def holding(self, minute: int) -> int:
        return sum(minutes[minute] for minutes in self.sold.values())

    @rule(minutes=st.sampled_from([0.0, 0.5, 1.0, 1.5, 4.0]))
    def time_passes(self, minutes: float) -> None:
        self.minute += minutes

    @rule()
    def the_agent_is_seen(self) -> None:
        hooks.observe_beat(self.agent, at(self.minute))

    @rule(minutes=st.integers(1, 5))
    def the_agent_counts(self, minutes: int) -> None:
        self.seq += 1
        records = [
            UsageRecord(seq=self.seq, assignment_id=lease_id, gpu_ms_total=minutes * gpus * 60_000, observed_at_ms=0)
            for lease_id, gpus in self.gpus.items()
        ]
        hooks.take_usage(self.agent, records, at(self.minute))

    @rule()
    def what_was_counted_is_charged(self) -> None:
        capture_due(at(self.minute))

    @rule(who=st.integers(0, 2), gpus=st.integers(1, GPUS), ahead=st.integers(0, 6), length=st.integers(1, 40))
    def someone_rents(self, who: int, gpus: int, ahead: int, length: int) -> None:
        start = int(self.minute) + ahead
        wanted = set(range(start, start + length))
        free = selectors.free_gpus(self.island, START_MIN + start, START_MIN + start + length)
        terms: dict[str, Any] = {"start_at": at(start)} if ahead else {}
        if who == 2:
            terms |= {"purpose": LeasePurpose.JOB, "job_ref": "job_1"}
        buyer = self.buyers[min(who, 1)]
        try:
            lease = rent(
                buyer,
                island_id=self.island.pk,
                gpus=gpus,
                end_at=at(start + length),
                by="t",
                now=at(self.minute),
                **terms,
            )
        except Conflict:
            assert free < gpus
        except InsufficientFunds:
            assert free >= gpus
        else:
            assert free >= gpus
            self.gpus[lease.pk] = gpus
            self.sold[lease.pk] = Counter(dict.fromkeys(wanted, gpus))
        # Slots are whole for a window, so there may be fewer than the emptiest minute leaves, never more.
        assert free <= GPUS - max(self.holding(minute) for minute in wanted) + (gpus if free >= gpus else 0)

    @precondition(lambda self: self.sold)
    @rule(data=st.data(), minutes=st.integers(-2, 8))
    def someone_extends(self, data: st.DataObject, minutes: int) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.sold)))
        lease = Lease.objects.select_related("island", "sku").get(pk=lease_id)
        until = selectors.extendable_until_min(lease)
        end_min = lease.end_min + minutes
        over = lease.state in LEASE_MACHINE.terminal or lease.end_min <= START_MIN + int(self.minute)
        try:
            extend(lease_id, end_at=at(end_min - START_MIN), by="t", now=at(self.minute))
        except InvalidInput:
            assert minutes < 0
        except Conflict:
            assert over or (until is not None and end_min > until)
        except InsufficientFunds:
            pass
        else:
            assert minutes == 0 or not over
            for minute in range(lease.end_min - START_MIN, end_min - START_MIN):
                self.sold[lease_id][minute] += lease.gpus

    @precondition(lambda self: self.sold)
    @rule(data=st.data(), twice=st.booleans())
    def someone_ends(self, data: st.DataObject, twice: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.sold)))
        was_over = Lease.objects.get(pk=lease_id).state in LEASE_MACHINE.terminal
        for _ in range(1 + twice):
            end_lease(lease_id, reason="released", by="t", now=at(self.minute))
        if not was_over:
            held = self.sold[lease_id]
            self.sold[lease_id] = Counter({minute: gpus for minute, gpus in held.items() if minute < self.minute})

    @rule()
    def the_sweep_comes(self) -> None:
        sweep_leases(at(self.minute))

    @rule(dear=st.booleans())
    def the_price_changes(self, dear: bool) -> None:
        Island.objects.update(price_uusd_per_gpu_hour=2 * PRICE if dear else PRICE)
        self.island.refresh_from_db()

    @rule(
        who=st.integers(0, 1),
        gpus=st.integers(1, GPUS),
        ahead=st.one_of(st.integers(0, 6), st.integers(10, 16)),
        length=st.integers(1, 12),
        limit=st.sampled_from([PRICE, 2 * PRICE]),
        tif=st.sampled_from(Tif.values),
        colocation=st.sampled_from(Colocation.values),
        parts=st.tuples(st.booleans(), st.booleans()),
        block=st.sampled_from([None, 1, 3]),
    )
    def someone_bids(
        self,
        who: int,
        gpus: int,
        ahead: int,
        length: int,
        limit: int,
        tif: str,
        colocation: str,
        parts: tuple[bool, bool],
        block: int | None,
    ) -> None:
        start = int(self.minute) + ahead
        fewer, shorter = parts
        wish = Wanted(
            gpus=gpus,
            island_id=self.island.pk,
            start_at=at(start) if ahead else None,
            end_at=at(start + length),
            limit_uusd_per_gpu_hour=limit,
            tif=tif,
            colocation=colocation,
            allow_partial_gpus=fewer and tif != Tif.FOK,
            allow_partial_time=shorter and tif != Tif.FOK and block is None,
            duration_min=None if block is None else min(block, length),
            min_block_min=2,
        )
        with contextlib.suppress(InsufficientFunds):
            place_order(Actor(self.buyers[who], Role.OWNER, "t"), wish, at(self.minute))
        self.notice_fills()

    @rule()
    def the_book_is_cleared(self) -> None:
        sweep_orders(at(self.minute))
        self.notice_fills()

    @precondition(lambda self: Order.objects.exists())
    @rule(data=st.data())
    def someone_takes_a_bid_back(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(list(Order.objects.order_by("created_at", "pk"))))
        cancel_order(Actor(order.organisation, Role.OWNER, "t"), order.pk, at(self.minute))

    @precondition(lambda self: self.sold)
    @rule(
        data=st.data(),
        gpus=st.integers(1, GPUS),
        skip=st.integers(0, 4),
        cut=st.integers(0, 4),
        price=st.sampled_from([PRICE // 2, PRICE]),
    )
    def someone_sells_on(self, data: st.DataObject, gpus: int, skip: int, cut: int, price: int) -> None:
        leases = Lease.objects.select_related("organisation").order_by("-end_min", "pk")
        lease = data.draw(st.sampled_from(list(leases[:4])))
        first = max(int(self.minute) + 10, lease.start_min - START_MIN) + skip
        length = lease.end_min - START_MIN - cut - first
        offer = Offer(lease.pk, gpus, price, at(first), at(first + length), min_block_min=1)
        held = self.sold[lease.pk]
        try:
            place_sale(Actor(lease.organisation, Role.OWNER, "t"), offer, at(self.minute))
        except (InvalidInput, Conflict):
            return
        assert lease.state not in LEASE_MACHINE.terminal
        assert all(held[minute] >= gpus for minute in range(first, first + length))

    @precondition(lambda self: Order.objects.filter(side=Side.SELL, state=OrderState.OPEN).exists())
    @rule(data=st.data(), gpus=st.integers(1, 2), skip=st.integers(0, 3), length=st.integers(1, 6))
    def someone_buys_of_a_holder(self, data: st.DataObject, gpus: int, skip: int, length: int) -> None:
        sales = Order.objects.filter(side=Side.SELL, state=OrderState.OPEN).order_by("created_at", "pk")
        sale = data.draw(st.sampled_from(list(sales)))
        other = next(buyer for buyer in self.buyers if buyer.pk != sale.organisation_id)
        wish = Wanted(
            gpus=gpus,
            island_id=self.island.pk,
            start_at=at(sale.start_min - START_MIN + skip),
            end_at=at(sale.start_min - START_MIN + skip + length),
            limit_uusd_per_gpu_hour=sale.limit_uusd_per_gpu_hour,
            tif=Tif.IOC,
            colocation=Colocation.ANY,
            allow_partial_gpus=True,
            allow_partial_time=True,
            min_block_min=1,
        )
        with contextlib.suppress(InsufficientFunds, InvalidInput):
            place_order(Actor(other, Role.OWNER, "t"), wish, at(self.minute))
        self.notice_fills()

    @rule(who=st.integers(0, 1), gpus=st.integers(1, GPUS), tail=st.integers(1, 6))
    def a_tail_changes_hands(self, who: int, gpus: int, tail: int) -> None:
        one, two = self.buyers[who], self.buyers[1 - who]
        first = int(self.minute) + 10
        try:
            lease = rent(one, island_id=self.island.pk, gpus=gpus, end_at=at(first + tail), by="t", now=at(self.minute))
            self.notice_fills()
            place_sale(Actor(one, Role.OWNER, "t"), Offer(lease.pk, 1, PRICE // 2, min_block_min=1), at(self.minute))
        except (Conflict, InsufficientFunds):
            return
        wish = Wanted(
            gpus=1,
            island_id=self.island.pk,
            start_at=at(first),
            end_at=at(first + tail),
            limit_uusd_per_gpu_hour=PRICE // 2,
            tif=Tif.FOK,
        )
        with contextlib.suppress(InsufficientFunds):
            # One that was for sale before and is cheaper may be taken instead.
            place_order(Actor(two, Role.OWNER, "t"), wish, at(self.minute))
        self.notice_fills()

    def notice_fills(self) -> None:
        for lease in Lease.objects.exclude(pk__in=self.sold).order_by("created_at", "pk"):
            window = range(lease.start_min - START_MIN, lease.end_min - START_MIN)
            self.gpus[lease.pk] = lease.gpus
            self.sold[lease.pk] = Counter(dict.fromkeys(window, lease.gpus))
            if lease.upstream_id is not None:
                FIRED["sold on"] += 1
                for minute in window:
                    self.sold[lease.upstream_id][minute] -= lease.gpus
                    self.sold_on[lease.upstream_id, minute] += lease.gpus
                    assert self.sold[lease.upstream_id][minute] >= 0

    @invariant()
    def an_order_holds_what_it_may_still_cost_and_never_paid_more_than_its_limit(self) -> None:
        for order in Order.objects.filter(side=Side.BUY).select_related("organisation"):
            held = LedgerAccount.objects.get(ref=order.pk).balance_uusd
            assert held == (most_uusd(order) if order.state == OrderState.OPEN else 0)
            leases = list(order.leases.all())
            minutes = [lease.gpus * (lease.end_min - lease.start_min) for lease in leases]
            paid = sum(lease.price_uusd_per_gpu_hour * part for lease, part in zip(leases, minutes, strict=True))
            # Leases that were extended or cut short were what they were when they were booked.
            if all(not lease.contracts.exclude(kind=ContractKind.RENT).exists() for lease in leases):
                assert paid <= order.limit_uusd_per_gpu_hour * sum(minutes)
                assert sum(minutes) <= order.gpus * (order.duration_min or order.end_min - order.start_min)

    @invariant()
    def every_minute_adds_up_and_none_is_sold_twice(self) -> None:
        rows = list(Position.objects.values_list("start_min", "end_min", "delta_lots", "originated"))
        slots = list(Allocation.objects.values_list("slot", "start_min", "end_min"))
        for minute in range(int(self.minute) + HORIZON):
            now_min = START_MIN + minute
            here = [(delta, sold) for start, end, delta, sold in rows if start <= now_min < end]
            assert sum(delta for delta, _ in here) == 0
            assert -GPUS <= sum(delta for delta, sold in here if sold) == -self.holding(minute) <= 0
            taken = [slot for slot, start, end in slots if start <= now_min < end]
            assert len(taken) == len(set(taken)) == self.holding(minute)

    @invariant()
    def nobody_holds_less_than_nothing_and_what_is_for_sale_is_held(self) -> None:
        rows = list(
            Position.objects.filter(originated=False).values_list("organisation", "start_min", "end_min", "delta_lots")
        )
        for minute in range(int(self.minute) + HORIZON):
            held: Counter[int] = Counter()
            for organisation, start, end, delta in rows:
                held[organisation] += delta if start <= START_MIN + minute < end else 0
            assert min(held.values(), default=0) >= 0
        for sale in Order.objects.filter(side=Side.SELL, state=OrderState.OPEN):
            assert sale.of_lease_id is not None
            for minute in range(sale.start_min - START_MIN, sale.end_min - START_MIN):
                offered = sum(low <= START_MIN + minute < high for _, low, high in sale.offered)
                assert offered <= self.sold[sale.of_lease_id][minute]

    @invariant()
    def the_books_are_right_and_the_money_is_all_there(self) -> None:
        assert breaches() == []
        for lease in Lease.objects.all():
            meter = Meter.objects.select_related("escrow").get(pk=lease.pk)
            bought = Contract.objects.filter(lease=lease).exclude(kind=ContractKind.RELEASE)
            cost_uusd = sum(c.price_uusd_per_gpu_hour // 60 * lease.gpus * (c.end_min - c.start_min) for c in bought)
            left = 0 if lease.settled_at else cost_uusd - meter.charged_uusd
            assert meter.escrow.balance_uusd == left
            assert 0 <= meter.charged_uusd <= cost_uusd
            resold = Meter.objects.filter(upstream=meter).values_list("billable_gpu_ms", flat=True)
            assert sum(resold) <= meter.billable_gpu_ms
        for buyer in self.buyers:
            charged = sum(Meter.objects.filter(buyer=buyer).values_list("charged_uusd", flat=True))
            sold = Meter.objects.filter(seller=buyer).values_list("charged_uusd", "fee_uusd")
            mine = LedgerAccount.objects.filter(organisation=buyer)
            earned = sum(charge - fee for charge, fee in sold)
            assert sum(row.balance_uusd for row in mine) == DOLLARS * USD - charged + earned

    def teardown(self) -> None:
        """All windows pass, all is settled: what is not charged is back in cash or in the job's escrow."""
        sweep_orders(at(self.minute + 10 * HORIZON))
        assert not Order.objects.filter(state=OrderState.OPEN).exists()
        for later in range(4):  # what was sold on is settled first
            sweep_leases(at(self.minute + 10 * HORIZON + 2 * later))
        assert not Lease.objects.filter(settled_at=None).exists()
        for ref in self.sold:
            assert LedgerAccount.objects.get(ref=ref).balance_uusd == 0
        one = self.buyers[0]
        charged = sum(Meter.objects.filter(buyer=one).values_list("charged_uusd", flat=True))
        assert cash(one).balance_uusd == DOLLARS * USD - charged


class Walk(RolledBack, Market):
    pass


@pytest.mark.django_db
def test_whatever_is_traded_in_whatever_order_every_minute_and_every_cent_adds_up() -> None:
    few = settings(max_examples=25, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(Walk, settings=few)
    assert FIRED["sold on"] >= 1  # a walk that never gets there proves nothing of it
