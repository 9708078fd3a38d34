"""Decisions take effect once, whole, and under a hold that stands."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from marketplace.core.clock import database_now
from marketplace.fleet.models import Island
from marketplace.trading.models import Contract, Lease
from marketplace.training.models import JobEvent, Member, SchedulerLock
from scheduler import lock, tasks
from scheduler.apply import apply
from scheduler.policy.placement import decide
from scheduler.policy.state import Place
from scheduler.snapshot import read_market
from tests.scheduler.scene import customer, island, job, live_leases, tick


@pytest.mark.django_db
def test_a_hold_excludes_others_until_it_is_released_or_over() -> None:
    now = database_now()
    token = lock.acquire(now)
    assert token is not None
    assert lock.acquire(now) is None
    lock.release(token)
    again = lock.acquire(now)
    assert again is not None
    assert lock.acquire(now + lock.HELD_FOR) not in (None, again)


@pytest.mark.django_db
def test_a_holder_whose_time_is_over_applies_nothing() -> None:
    wanted = job(customer())
    island()
    token = lock.acquire(database_now() - timedelta(minutes=5))
    assert token is not None
    decisions = decide(read_market(database_now()))
    assert any(isinstance(decision, Place) for decision in decisions)
    assert apply(decisions, token) == 0
    assert live_leases(wanted) == []


@pytest.mark.django_db
def test_a_decision_the_world_has_outrun_is_told_and_dropped() -> None:
    wanted = job(customer(), max_islands=1)
    dearer = island()
    decisions = decide(read_market(database_now()))
    Island.objects.filter(pk=dearer.pk).update(price_uusd_per_gpu_hour=9_000_000)
    token = lock.acquire(database_now())
    assert token is not None
    assert apply(decisions, token) == 0
    assert live_leases(wanted) == []
    assert "outrun" in JobEvent.objects.filter(job=wanted, kind="decision").latest("id").message


@pytest.mark.django_db
def test_a_decision_cut_off_in_the_middle_leaves_nothing_and_the_next_tick_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = job(customer(), max_islands=1)
    island()

    class Killed(BaseException):
        """As a worker that is killed: nothing of ours may catch it."""

    def cut_off(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("scheduler.apply.training.place_member", cut_off)
        with pytest.raises(Killed):
            tick()
    assert not Lease.objects.exists()
    assert not Contract.objects.exists()
    tick()
    assert len(live_leases(wanted)) == 1


@pytest.mark.django_db
def test_a_worker_that_died_holding_holds_up_nobody_for_longer_than_its_time() -> None:
    wanted = job(customer(), max_islands=1)
    island()
    lock.acquire(database_now())
    assert tick() == 0
    SchedulerLock.objects.update(expires_at=database_now())
    tick()
    assert len(live_leases(wanted)) == 1


@pytest.mark.django_db(transaction=True)
def test_ticks_at_the_same_time_place_a_job_once() -> None:
    wanted = job(customer(), max_islands=2)
    island(), island()

    def one(_: int) -> None:
        try:
            tasks.tick()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8)))
    assert len(live_leases(wanted)) == 2
    assert Member.objects.filter(job=wanted).count() == 2


@pytest.mark.django_db
def test_looking_costs_the_same_queries_for_many_islands_and_jobs(django_assert_max_num_queries: Any) -> None:
    actor = customer(dollars=100_000)
    for _ in range(12):
        island()
    for _ in range(8):
        job(actor, budget_uusd=900_000_000, max_islands=1)
    tick()
    assert Lease.objects.count() >= 8
    with django_assert_max_num_queries(14):
        market = read_market(database_now())
    assert len(market.islands) == 12
    assert len(market.seats) >= 8


@pytest.mark.django_db
def test_a_sweep_that_fails_stops_no_other_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def breaks(_: object) -> None:
        raise RuntimeError("broken")

    def works(_: object) -> None:
        ran.append("works")

    monkeypatch.setattr(tasks, "SWEEPS", (breaks, works))
    with pytest.raises(ExceptionGroup):
        tasks.sweep()
    assert ran == ["works"]
