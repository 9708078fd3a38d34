"""Thirty days of a market of two hundred, with a seed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from django.db import transaction
from django.db.models import Sum
from pytest_django import Settings

from marketplace.billing.invariants import breaches
from marketplace.billing.models import LedgerAccount, Meter, MeterState, Payout, PayoutState
from marketplace.billing.services.books import compare_books
from marketplace.core.clock import database_now
from marketplace.trading.models import Lease, Order, OrderState, Position
from tests.fakes.stripe import FakeStripe
from tests.prove.month import Month, own_time_and_chance

pytestmark = [pytest.mark.prove, pytest.mark.django_db]

SEED = int(os.environ.get("ARCHIPELAGO_SEED", "20261201"))
DAYS = int(os.environ.get("ARCHIPELAGO_DAYS", "30"))


@pytest.fixture
def stripe(settings: Settings) -> Iterator[FakeStripe]:
    with FakeStripe() as fake:
        settings.STRIPE_API_BASE, settings.STRIPE_SECRET_KEY = fake.url, fake.key
        yield fake


@pytest.mark.django_db(transaction=True)  # each act commits: in one transaction every row would drag its past along
def test_a_month_of_trade_failures_disputes_and_payouts_ends_with_every_invariant_true(
    stripe: FakeStripe, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = database_now().replace(second=0, microsecond=0)
    clock = [start]
    with own_time_and_chance(monkeypatch, lambda: clock[0], SEED):
        month = Month(stripe, SEED, start)
        took_s = 0.0
        for day in range(DAYS):
            began = time.monotonic()
            month.day()
            took_s += time.monotonic() - began
            clock[0] = month.now
            assert breaches() == [], f"seed {SEED}, day {day}"
            assert Position.objects.aggregate(total=Sum("delta_lots"))["total"] in (0, None), f"seed {SEED}, day {day}"
        month.close()
    print(f"seed {SEED}: {DAYS} days in {took_s:.1f} s; {dict(month.fired)}; refused {dict(month.refused)}")
    assert breaches() == [], f"seed {SEED}"
    assert compare_books().unexplained_uusd == 0, f"seed {SEED}"
    assert not Order.objects.filter(state=OrderState.OPEN).exists()
    assert not Lease.objects.filter(settled_at=None).exists()
    assert not Meter.objects.filter(state=MeterState.OPEN).exists()
    held = LedgerAccount.objects.filter(kind="escrow")
    assert sum(row.balance_uusd for row in held) == 0
    assert Payout.objects.filter(state=PayoutState.PAID).count() >= 3
    never = {name for name in vars(Month) if name.startswith(("someone_", "a_", "an_"))} - set(month.fired)
    assert never == set(), f"seed {SEED}: these never happened"
    assert month.fired["sold on"] >= 3


def test_the_same_seed_is_the_same_market(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    start = database_now().replace(second=0, microsecond=0)

    def prints(seed: int) -> str:
        world = transaction.atomic()
        world._from_testcase = True  # as the test's own: what calls the provider refuses to within any other
        with FakeStripe() as fake, world:
            settings.STRIPE_API_BASE, settings.STRIPE_SECRET_KEY = fake.url, fake.key
            clock = [start]
            with own_time_and_chance(monkeypatch, lambda: clock[0], seed):
                month = Month(fake, seed, start, people=40)
                for _ in range(3):
                    month.day()
                    clock[0] = month.now
                month.close()
            found = month.print_of_ledger()
            transaction.set_rollback(True)
            return found

    assert prints(7) == prints(7)
    assert prints(7) != prints(8)
