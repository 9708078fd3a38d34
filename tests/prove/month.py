"""A market in one process, with a seed: participants who pay in, rent, bid, sell on, give back and are paid out;
islands that fail; payments that are disputed. Time is the market's own: a step is four hours, and nothing waits.

Invariant: whatever a service refuses for a reason it names is part of the game; whatever else it raises is a failure.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TypeVar

import httpx
import pytest

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Organisation, Role
from marketplace.billing.models import (
    AccountKind,
    LedgerAccount,
    Meter,
    MeterState,
    PaymentDispute,
    SellerAccount,
    TopUp,
    TopUpState,
)
from marketplace.billing.services import disputes, metering
from marketplace.billing.services.card_refunds import refund_cash, sweep_refunds
from marketplace.billing.services.maturing import mature_earnings, release_reserves
from marketplace.billing.services.payouts import open_seller_account, refresh_seller_account, sweep_payouts
from marketplace.billing.services.refunds import refund
from marketplace.billing.services.settling import settle_payments
from marketplace.billing.services.ticking import capture_due
from marketplace.billing.services.topups import open_payment, settle_top_up, start_top_up
from marketplace.core import ids
from marketplace.core.clock import minute_of
from marketplace.core.errors import Problem
from marketplace.fleet import hooks
from marketplace.fleet.models import Agent, Island, IslandState
from marketplace.trading.models import Colocation, Lease, LeaseState, Order, OrderState, Side, Tif
from marketplace.trading.orders import Change, Wanted
from marketplace.trading.selectors import LIVE, pieces_of
from marketplace.trading.services import (
    Offer,
    amend_order,
    cancel_order,
    end_lease,
    extend,
    place_order,
    place_sale,
    rent,
    sweep_leases,
    sweep_orders,
)
from tests.fakes.stripe import FakeStripe
from tests.marketplace.trading.market import PRICE, USD, make_agent, make_island
from worker_agent.protocol import UsageRecord

T = TypeVar("T")
STEP = timedelta(hours=4)
STEPS_A_DAY = 6


@dataclass
class Month:
    """`people` organisations, a fifth of whom have islands."""

    stripe: FakeStripe
    seed: int
    start: datetime
    people: int = 200
    fired: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.web = httpx.Client(trust_env=False)
        self.now = self.start
        self.actors = [
            Actor(Organisation.objects.create(name=f"participant {number}"), Role.OWNER, "sim")
            for number in range(self.people)
        ]
        self.sellers = self.actors[: self.people // 5]
        self.islands: list[tuple[Island, Agent]] = []
        for number, seller in enumerate(self.sellers[: max(4, self.people // 10)]):
            island = make_island(
                seller.organisation,
                name=f"island {number}",
                gpu_count=self.rng.choice([2, 4, 8]),
                price_uusd_per_gpu_hour=self.rng.choice([PRICE // 2, PRICE, PRICE + 600_000]),
                available_from=self.start - timedelta(days=1),
            )
            self.islands.append((island, make_agent(island)))
        for actor in self.rng.sample(self.actors, self.people // 4):
            self.pay_in(actor)
        for seller in self.sellers[::2]:
            self.web.post(open_seller_account(seller, self.now), data={"button": "done"})
            refresh_seller_account(seller.organisation, self.now)

    # ---------------------------------------------------------------------------------------------------------- time

    def day(self) -> None:
        for step in range(STEPS_A_DAY):
            self.now += STEP
            for _ in range(self.rng.randint(2, 5)):
                self.somebody_acts()
            self.serve()
            sweep_leases(self.now)
            sweep_orders(self.now)
            if step == 0:
                self.money()

    def somebody_acts(self) -> None:
        acts: list[tuple[Callable[[], None], int]] = [
            (self.someone_pays_in, 2),
            (self.someone_rents, 5),
            (self.someone_bids, 6),
            (self.someone_sells_on, 6),
            (self.someone_extends, 2),
            (self.someone_ends, 2),
            (self.someone_cancels, 2),
            (self.someone_amends, 2),
            (self.a_price_moves, 2),
            (self.an_island_fails, 1),
            (self.a_payment_is_disputed, 1),
            (self.a_dispute_is_decided, 1),
            (self.someone_wants_cash_back, 1),
            (self.a_buyer_complains, 1),
        ]
        act = self.rng.choices([act for act, _ in acts], [weight for _, weight in acts])[0]
        name = act.__name__
        try:
            act()
        except Problem as problem:
            self.refused[f"{name}: {problem.code}"] += 1
        else:
            self.fired[name] += 1

    def serve(self) -> None:
        """Every agent that holds something is seen and tells what it counted, of what it was there for."""
        held_by: dict[str, list[Lease]] = {}
        for lease in Lease.objects.filter(settled_at=None).order_by("created_at", "pk"):
            held_by.setdefault(lease.island_id, []).append(lease)
        for island, agent in self.islands:
            if island.pk not in held_by:
                continue
            hooks.observe_beat(agent, self.now)
            leases = [lease for lease in held_by[island.pk] if lease.state in LIVE]
            held = pieces_of(leases)
            records = []
            for lease in leases:
                for piece in held[lease.pk]:
                    minutes = min(minute_of(self.now), piece.end_min) - piece.start_min
                    if minutes > 0:
                        counted = minutes * 60_000 * piece.lots * self.rng.choice([100, 100, 97]) // 100
                        records.append(
                            UsageRecord(seq=1, assignment_id=piece.id, gpu_ms_total=counted, observed_at_ms=0)
                        )
            hooks.take_usage(agent, records, self.now)
        capture_due(self.now)

    def money(self) -> None:
        settle_payments(self.now, timedelta(0))
        mature_earnings(self.now)
        release_reserves(self.now)
        sweep_refunds(self.now)
        sweep_payouts(self.now)

    # --------------------------------------------------------------------------------------------------------- people

    def pay_in(self, actor: Actor) -> None:
        dollars = self.rng.choice([50, 200, 500])
        top_up = open_payment(start_top_up(actor, amount_uusd=dollars * USD, now=self.now).pk, self.now)
        self.web.post(top_up.pay_url, data={"button": "pay" if self.rng.random() < 0.9 else "decline"})
        settle_top_up(top_up.pk, self.now)

    def someone_pays_in(self) -> None:
        self.pay_in(self.rng.choice(self.actors))

    def someone_rents(self) -> None:
        actor, (island, _) = self.rich(), self.rng.choice(self.islands)
        rent(
            actor.organisation,
            island_id=island.pk,
            gpus=self.rng.randint(1, 2),
            end_at=self.now + timedelta(hours=self.rng.choice([3, 12, 30, 72])),
            by=actor.name,
            now=self.now,
        )

    def someone_bids(self) -> None:
        actor = self.rich()
        ahead, length = timedelta(hours=self.rng.randint(0, 30)), timedelta(hours=self.rng.choice([2, 6, 12]))
        wish = Wanted(
            gpus=self.rng.randint(1, 3),
            gpu="h100-sxm-80g",
            start_at=self.now + ahead,
            end_at=self.now + ahead + length,
            limit_uusd_per_gpu_hour=PRICE * self.rng.randint(3, 12) // 10 // 60 * 60,
            tif=self.rng.choice(Tif.values[1:]),
            colocation=self.rng.choice(Colocation.values),
            allow_partial_gpus=self.rng.random() < 0.4,
            allow_partial_time=self.rng.random() < 0.4,
            expires_at=self.now + timedelta(days=2),
        )
        place_order(actor, wish, self.now)

    def someone_sells_on(self) -> None:
        rows = Lease.objects.filter(state__in=LIVE, purpose="reserve", end_min__gt=minute_of(self.now) + 180)
        lease = self.any_lease(rows)
        first_min = max(lease.start_min, minute_of(self.now) + 20)
        first = self.now + timedelta(minutes=first_min - minute_of(self.now))
        price = lease.price_uusd_per_gpu_hour * self.rng.randint(4, 9) // 10 // 60 * 60
        offer = Offer(lease.pk, self.rng.randint(1, lease.gpus), price, first, min_block_min=60)
        order = place_sale(Actor(lease.organisation, Role.OWNER, "sim"), offer, self.now)
        if self.rng.random() < 0.8:
            self.somebody_takes(order)

    def somebody_takes(self, sale: Order) -> None:
        """Who looks for what is for sale."""
        actor = self.rich()
        start_at = self.now + timedelta(minutes=sale.start_min - minute_of(self.now))
        wish = Wanted(
            gpus=1,
            island_id=sale.island_id,
            start_at=start_at,
            end_at=start_at + timedelta(minutes=self.rng.choice([60, 120, sale.end_min - sale.start_min])),
            limit_uusd_per_gpu_hour=sale.limit_uusd_per_gpu_hour,
            tif=Tif.IOC,
        )
        if place_order(actor, wish, self.now).leases.filter(sale=sale).exists():
            self.fired["sold on"] += 1

    def someone_extends(self) -> None:
        lease = self.any_lease(Lease.objects.filter(state=LeaseState.ACTIVE))
        end_at = self.start + timedelta(minutes=lease.end_min - minute_of(self.start)) + timedelta(hours=4)
        extend(lease.pk, end_at=end_at, by="sim", now=self.now)

    def someone_ends(self) -> None:
        lease = self.any_lease(Lease.objects.filter(state__in=LIVE))
        end_lease(lease.pk, reason="released", by="sim", now=self.now)

    def someone_cancels(self) -> None:
        order = self.any_order()
        cancel_order(Actor(order.organisation, Role.OWNER, "sim"), order.pk, self.now)

    def someone_amends(self) -> None:
        order = self.any_order()
        price = order.limit_uusd_per_gpu_hour * (9 if order.side == Side.SELL else 11) // 10 // 60 * 60
        amend_order(Actor(order.organisation, Role.OWNER, "sim"), order.pk, Change(price), self.now)

    def a_price_moves(self) -> None:
        island, _ = self.rng.choice(self.islands)
        price = PRICE * self.rng.randint(5, 13) // 10 // 60 * 60
        Island.objects.filter(pk=island.pk).update(price_uusd_per_gpu_hour=price)

    def an_island_fails(self) -> None:
        """It is lost for a moment, with all that ran on it; an operator refunds the last of what was charged."""
        island, _ = self.rng.choice(self.islands)
        Island.objects.filter(pk=island.pk).update(state=IslandState.LOST)
        for lease in Lease.objects.filter(island=island, state__in=LIVE).order_by("created_at", "pk"):
            end_lease(lease.pk, reason="island_lost", failed=True, by="sim", now=self.now)
            charged = Meter.objects.get(pk=lease.pk).charged_uusd
            if charged > 10:
                refund(f"lost:{lease.pk}", lease.pk, charged // 10, reason="island lost", by="sim", now=self.now)
        Island.objects.filter(pk=island.pk).update(state=IslandState.ONLINE)

    def a_payment_is_disputed(self) -> None:
        known = PaymentDispute.objects.values("top_up")
        rows = (
            TopUp.objects.filter(state=TopUpState.PAID, refunds=None).exclude(pk__in=known).order_by("created_at", "pk")
        )
        top_up = self.pick(list(rows))
        disputes.follow_dispute(self.stripe.dispute(top_up.payment_ref or ""), self.now)

    def a_dispute_is_decided(self) -> None:
        row = self.pick(list(PaymentDispute.objects.filter(state="open").order_by("opened_at", "pk")))
        self.stripe.decide(row.pk, won=self.rng.random() < 0.5)
        disputes.follow_dispute(row.pk, self.now)

    def someone_wants_cash_back(self) -> None:
        refund_cash(self.rich(), self.rng.randint(1, 20) * USD, self.now)

    def a_buyer_complains(self) -> None:
        meters = Meter.objects.filter(state=MeterState.CLOSED, charged_uusd__gt=100).order_by("start_at", "pk")
        meter = self.pick(list(meters[:50]))
        refund(f"slow:{meter.pk}", meter.pk, meter.charged_uusd // 4, reason="slow", by="sim", now=self.now)

    # -------------------------------------------------------------------------------------------------------- choices

    def rich(self) -> Actor:
        rows = LedgerAccount.objects.filter(kind=AccountKind.BUYER_CASH, credits_posted_uusd__gt=0)
        have = set(rows.values_list("organisation", flat=True))
        return self.pick([actor for actor in self.actors if actor.organisation.pk in have])

    def any_lease(self, rows: object) -> Lease:
        assert hasattr(rows, "select_related")
        return self.pick(list(rows.select_related("organisation").order_by("created_at", "pk")))

    def any_order(self) -> Order:
        rows = Order.objects.filter(state=OrderState.OPEN).select_related("organisation")
        return self.pick(list(rows.order_by("created_at", "pk")))

    def pick(self, rows: list[T]) -> T:
        if not rows:
            raise Problem("there is none", code="none")
        return self.rng.choice(rows)

    # ------------------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Everybody goes home: what stands is cancelled, what runs is ended and settled, what is open decided."""
        for order in Order.objects.filter(state=OrderState.OPEN).select_related("organisation"):
            cancel_order(Actor(order.organisation, Role.OWNER, "sim"), order.pk, self.now)
        for lease in Lease.objects.filter(state__in=LIVE):
            end_lease(lease.pk, reason="released", by="sim", now=self.now)
        for row in PaymentDispute.objects.filter(state="open"):
            self.stripe.decide(row.pk, won=True)
            disputes.follow_dispute(row.pk, self.now)
        for days in (1, 2, 3, 4, 35, 40):
            self.now += timedelta(days=days)
            sweep_leases(self.now)
            self.money()
        self.web.close()

    def print_of_ledger(self) -> str:
        """The same for the same seed: every balance, by whose and what for."""
        order = {actor.organisation.pk: number for number, actor in enumerate(self.actors)}
        sums: Counter[tuple[str, int]] = Counter()
        for row in LedgerAccount.objects.all():
            sums[row.kind, order.get(row.organisation_id or 0, -1)] += row.balance_uusd
        return hashlib.sha256(repr(sorted((key, value) for key, value in sums.items() if value)).encode()).hexdigest()

    def paid_sellers(self) -> int:
        return SellerAccount.objects.filter(organisation__payouts__state="paid").distinct().count()


@contextmanager
def own_time_and_chance(patch: pytest.MonkeyPatch, month: Callable[[], datetime], seed: int) -> Iterator[None]:
    """Ids by the market's clock and the seed, and beats that may lie a step apart."""
    rng = random.Random(seed)
    numbers = iter(range(10**9))

    def time_ns() -> int:
        return (int(month().timestamp() * 1_000) + next(numbers)) * 10**6

    patch.setattr(ids, "time", SimpleNamespace(time_ns=time_ns))
    patch.setattr(ids, "secrets", SimpleNamespace(token_bytes=rng.randbytes))
    patch.setattr(metering, "COVERAGE_GAP_MS", int(STEP.total_seconds() * 1_000))
    yield
