"""Leases in an agent's sync, through the hooks as the sync calls them."""

from __future__ import annotations

from typing import Any

import pytest

from marketplace.accounts.models import Organisation
from marketplace.billing.models import Meter
from marketplace.billing.services.holds import hold
from marketplace.core.clock import to_ms
from marketplace.fleet import hooks
from marketplace.fleet.models import Agent, Island
from marketplace.trading.models import Lease
from marketplace.trading.services import end_lease, settle
from tests.marketplace.trading.market import (
    GPU_MINUTE,
    USD,
    at,
    cash_uusd,
    charge_counted,
    for_job,
    leased,
    make_agent,
    make_island,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def agent(island: Island) -> Agent:
    return make_agent(island)


def beats(agent: Agent, first: float, last: float) -> None:
    for half in range(int(first * 2), int(last * 2) + 1):
        hooks.observe_beat(agent, at(half / 2))


def counted(agent: Agent, lease: Lease, minutes: float, now: float = 0) -> None:
    charge_counted(agent, lease, int(minutes * 60_000) * lease.gpus, at(now))


def charged(lease: Lease) -> int:
    return Meter.objects.get(pk=lease.pk).charged_uusd


def test_a_reservation_is_assigned_from_a_little_before_its_start_to_its_end(
    buyer: Organisation, island: Island
) -> None:
    lease = leased(buyer, island, gpus=3, start=10, end=20)
    assert hooks.assignments_for(island, at(7)) == []
    (assignment,) = hooks.assignments_for(island, at(8))
    assert (assignment.id, assignment.kind, assignment.gpus) == (lease.pk, "reserve", 3)
    assert (assignment.start_at_ms, assignment.stop_at_ms) == (to_ms(at(10)), to_ms(at(20)))
    assert hooks.assignments_for(island, at(19.9)) == [assignment]
    assert hooks.assignments_for(island, at(20)) == []
    assert hooks.assignments_for(make_island(), at(15)) == []


def test_a_lease_that_ended_or_is_for_a_job_is_no_reservation(buyer: Organisation, island: Island) -> None:
    hold("job_1", buyer, 100 * USD)
    for_job(buyer, island, "job_1")
    lease = leased(buyer, island)
    end_lease(lease.pk, reason="released", by="user:1", now=at(5))
    assert hooks.assignments_for(island, at(5)) == []


def test_an_island_without_leases_costs_a_beat_one_query(agent: Agent, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        hooks.observe_beat(agent, at(0))


def test_what_was_seen_and_counted_is_charged(buyer: Organisation, island: Island, agent: Agent) -> None:
    lease = leased(buyer, island, gpus=2)
    beats(agent, 0, 10)
    counted(agent, lease, 10)
    counted(agent, lease, 4)
    assert charged(lease) == 20 * GPU_MINUTE


def test_silence_is_not_billed_and_the_reservation_is_kept(buyer: Organisation, island: Island, agent: Agent) -> None:
    lease = leased(buyer, island)
    beats(agent, 0, 10)
    beats(agent, 30, 40)
    counted(agent, lease, 40)
    assert charged(lease) == 20 * GPU_MINUTE
    assert len(hooks.assignments_for(island, at(40))) == 1


def test_nothing_after_the_end_is_billed_though_the_agent_counts_on(
    buyer: Organisation, island: Island, agent: Agent
) -> None:
    lease = leased(buyer, island)
    beats(agent, 0, 10)
    end_lease(lease.pk, reason="released", by="user:1", now=at(10.25))
    beats(agent, 10.5, 12)
    counted(agent, lease, 12)
    assert charged(lease) == 10 * GPU_MINUTE + GPU_MINUTE // 4
    settle(lease.pk, at(12))
    counted(agent, lease, 60)
    assert cash_uusd(buyer) == 1_000 * USD - charged(lease)


def test_an_agent_counts_only_for_its_own_island(
    buyer: Organisation, island: Island, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    lease = leased(buyer, island)
    stranger = make_agent(make_island())
    beats(agent, 0, 10)
    counted(stranger, lease, 10)
    assert charged(lease) == 0
    assert lease.pk in caplog.text


def test_a_new_agent_of_the_island_adds_to_what_the_one_before_counted(
    buyer: Organisation, island: Island, agent: Agent
) -> None:
    lease = leased(buyer, island)
    beats(agent, 0, 10)
    counted(agent, lease, 5)
    counted(make_agent(island, epoch=2), lease, 3)
    assert charged(lease) == 8 * GPU_MINUTE


def test_who_holds_an_island_is_named(buyer: Organisation, island: Island) -> None:
    assert hooks.holders_of(island, at(0)) == []
    lease = leased(buyer, island, start=100, end=200)
    assert hooks.holders_of(island, at(0)) == [f"lease {lease.pk}"]
