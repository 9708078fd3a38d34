"""Any sequence of renting, extending, ending, bidding, beats and sweeps, against a grid of minutes and GPUs that a
child could check."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role
from marketplace.billing.invariants import breaches
from marketplace.billing.models import LedgerAccount, Meter
from marketplace.billing.services.holds import cash, hold
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
    Tif,
)
from marketplace.trading.orders import Wanted
from marketplace.trading.services import (
    cancel_order,
    end_lease,
    extend,
    most_uusd,
    place_order,
    rent,
    sweep_leases,
    sweep_orders,
)
from tests.marketplace.trading.market import PRICE, START_MIN, USD, at, funded, make_agent, make_island
from worker_agent.protocol import UsageRecord

GPUS = 3
HORIZON = 40
DOLLARS = 5


class Market(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.island = make_island(gpu_count=GPUS)
        self.agent = make_agent(self.island)
        self.buyers = [funded(name, DOLLARS) for name in ("one", "two")]
        hold("job_1", self.buyers[1], 2 * USD)
        self.minute = 0.0
        self.sold: dict[str, tuple[int, set[int]]] = {}  # by lease: its GPUs and the minutes it holds
        self.seq = 0

    def holding(self, minute: int) -> int:
        return sum(gpus for gpus, minutes in self.sold.values() if minute in minutes)

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
            for lease_id, (gpus, _) in self.sold.items()
        ]
        hooks.take_usage(self.agent, records, at(self.minute))

    @rule(who=st.integers(0, 2), gpus=st.integers(1, GPUS), ahead=st.integers(0, 6), length=st.integers(1, 12))
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
            self.sold[lease.pk] = (gpus, wanted)
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
            self.sold[lease_id][1].update(range(lease.end_min - START_MIN, end_min - START_MIN))

    @precondition(lambda self: self.sold)
    @rule(data=st.data(), twice=st.booleans())
    def someone_ends(self, data: st.DataObject, twice: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.sold)))
        was_over = Lease.objects.get(pk=lease_id).state in LEASE_MACHINE.terminal
        for _ in range(1 + twice):
            end_lease(lease_id, reason="released", by="t", now=at(self.minute))
        if not was_over:
            gpus, minutes = self.sold[lease_id]
            self.sold[lease_id] = gpus, {minute for minute in minutes if minute < self.minute}

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
        ahead=st.integers(0, 6),
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

    def notice_fills(self) -> None:
        for lease in Lease.objects.exclude(pk__in=self.sold):
            self.sold[lease.pk] = (lease.gpus, set(range(lease.start_min - START_MIN, lease.end_min - START_MIN)))

    @invariant()
    def an_order_holds_what_it_may_still_cost_and_never_paid_more_than_its_limit(self) -> None:
        for order in Order.objects.select_related("organisation"):
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
    def the_books_are_right_and_the_money_is_all_there(self) -> None:
        assert breaches() == []
        for lease in Lease.objects.all():
            meter = Meter.objects.select_related("escrow").get(pk=lease.pk)
            bought = Contract.objects.filter(lease=lease).exclude(kind=ContractKind.RELEASE)
            cost_uusd = sum(c.price_uusd_per_gpu_hour // 60 * lease.gpus * (c.end_min - c.start_min) for c in bought)
            left = 0 if lease.settled_at else cost_uusd - meter.charged_uusd
            assert meter.escrow.balance_uusd == left
            assert 0 <= meter.charged_uusd <= cost_uusd
        for buyer in self.buyers:
            charged = sum(Meter.objects.filter(buyer=buyer).values_list("charged_uusd", flat=True))
            mine = LedgerAccount.objects.filter(organisation=buyer)
            assert sum(row.balance_uusd for row in mine) == DOLLARS * USD - charged

    def teardown(self) -> None:
        """All windows pass, all is settled: what is not charged is back in cash or in the job's escrow."""
        sweep_orders(at(self.minute + 10 * HORIZON))
        assert not Order.objects.filter(state=OrderState.OPEN).exists()
        sweep_leases(at(self.minute + 10 * HORIZON))
        sweep_leases(at(self.minute + 10 * HORIZON + 2))
        assert not Lease.objects.filter(settled_at=None).exists()
        for ref in self.sold:
            assert LedgerAccount.objects.get(ref=ref).balance_uusd == 0
        one = self.buyers[0]
        charged = sum(Meter.objects.filter(buyer=one).values_list("charged_uusd", flat=True))
        assert cash(one).balance_uusd == DOLLARS * USD - charged


class RolledBack(Market):
    """Each example in a transaction of its own, thrown away at its end."""

    def __init__(self) -> None:
        self.transaction = transaction.atomic()
        self.transaction.__enter__()
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            transaction.set_rollback(True)
            self.transaction.__exit__(None, None, None)


@pytest.mark.django_db
def test_whatever_is_traded_in_whatever_order_every_minute_and_every_cent_adds_up() -> None:
    few = settings(max_examples=25, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(RolledBack, settings=few)
