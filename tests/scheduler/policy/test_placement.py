"""The policy's contract: memory, budget and capacity hold whatever the market looks like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.placement import decide, minute_cost_uusd
from scheduler.policy.state import Extend, Gpu, Island, Job, Market, Place, Release, Seat, Wait

H100 = Gpu("h100-sxm-80g", 989.0, 80.0)
L4 = Gpu("l4-pcie-24g", 121.0, 24.0)
NOW = 29_000_000
CHEAP = Island("isl_a", H100.id, 8, 1_800_000, up_mbps=1000, down_mbps=1000)
DEAR = Island("isl_b", H100.id, 8, 3_600_000, up_mbps=1000, down_mbps=1000)
SMALL = Island("isl_c", L4.id, 1, 300_000, up_mbps=1000, down_mbps=1000)
JOB = Job("job_1", parameters=1_000_000_000, tokens_left=10**10, free_budget_uusd=10**9, batch_tokens=500_000)


def market(*islands: Island, jobs: tuple[Job, ...] = (JOB,), seats: tuple[Seat, ...] = ()) -> Market:
    return Market(NOW, (H100, L4), islands, jobs, seats)


def seat(**changes: Any) -> Seat:
    return replace(Seat("lse_1", JOB.id, CHEAP.id, 8, CHEAP.price_uusd_per_gpu_hour, NOW + 20, 400_000.0), **changes)


def placed(decisions: Sequence[object]) -> list[Place]:
    return [decision for decision in decisions if isinstance(decision, Place)]


def test_a_job_takes_the_island_with_most_tokens_per_dollar_first() -> None:
    first = placed(decide(market(DEAR, CHEAP)))[0]
    assert first.island_id == CHEAP.id
    assert first.until_min <= NOW + 30


def test_an_island_known_to_be_slow_is_worth_less_than_its_sheet_says() -> None:
    first = placed(decide(market(DEAR, replace(CHEAP, relative_speed=0.01))))[0]
    assert first.island_id == DEAR.id


def test_an_island_that_cannot_hold_the_model_is_not_taken() -> None:
    (wait,) = decide(market(SMALL))
    assert isinstance(wait, Wait)
    assert wait.reason == "memory"


def test_without_an_allowed_gpu_the_job_waits_and_says_so() -> None:
    job = replace(JOB, allowed_gpus=frozenset({"b200-sxm-180g"}))
    (wait,) = decide(market(CHEAP, jobs=(job,)))
    assert isinstance(wait, Wait)
    assert wait.reason == "no_island"


def test_a_budget_that_cannot_finish_takes_nothing_and_names_the_price_that_could() -> None:
    (wait,) = decide(market(CHEAP, jobs=(replace(JOB, free_budget_uusd=1_000_000),)))
    assert isinstance(wait, Wait)
    assert wait.reason == "budget"
    assert "$1.00 is free" in wait.why


def test_below_the_minimum_of_islands_nothing_is_taken() -> None:
    (wait,) = decide(market(CHEAP, jobs=(replace(JOB, min_islands=2),)))
    assert isinstance(wait, Wait)
    assert wait.reason == "islands"


def test_a_late_island_joins_a_running_job() -> None:
    decisions = decide(market(replace(CHEAP, free_gpus=0), DEAR, seats=(seat(),)))
    assert [place.island_id for place in placed(decisions)] == [DEAR.id]


def test_a_lost_island_is_released_and_replaced_in_the_same_tick() -> None:
    decisions = decide(market(replace(CHEAP, free_gpus=0), DEAR, seats=(seat(lost=True),)))
    assert isinstance(decisions[0], Release)
    assert [place.island_id for place in placed(decisions)] == [DEAR.id]


def test_a_lease_near_its_end_is_extended_within_the_money() -> None:
    job = replace(JOB, free_budget_uusd=minute_cost_uusd(CHEAP.price_uusd_per_gpu_hour, 8) * 7)
    (extend,) = decide(market(replace(CHEAP, free_gpus=0), jobs=(job,), seats=(seat(end_min=NOW + 2),)))
    assert isinstance(extend, Extend)
    assert extend.until_min == NOW + 2 + 7


def test_a_lease_is_not_extended_into_hours_somebody_else_holds() -> None:
    held = seat(end_min=NOW + 2, extendable_until_min=NOW + 2)
    assert decide(market(replace(CHEAP, free_gpus=0), seats=(held,))) == []


def test_no_lease_reaches_past_the_deadline() -> None:
    (place,) = placed(decide(market(CHEAP, jobs=(replace(JOB, deadline_min=NOW + 11),))))
    assert place.until_min <= NOW + 11


def test_past_its_deadline_a_job_takes_nothing() -> None:
    (wait,) = decide(market(CHEAP, jobs=(replace(JOB, deadline_min=NOW),)))
    assert isinstance(wait, Wait)
    assert wait.reason == "deadline"


def test_the_same_state_gives_the_same_decisions() -> None:
    assert decide(market(CHEAP, DEAR, SMALL)) == decide(market(CHEAP, DEAR, SMALL))


islands = st.builds(
    Island,
    id=st.uuids().map(str),
    gpu=st.sampled_from([H100.id, L4.id, "unheard-of"]),
    free_gpus=st.integers(0, 64),
    price_uusd_per_gpu_hour=st.integers(0, 200_000).map(lambda step: step * 60),
    up_mbps=st.none() | st.floats(1, 100_000),
    down_mbps=st.none() | st.floats(1, 100_000),
    free_until_min=st.none() | st.integers(NOW - 10, NOW + 300),
    min_lease_min=st.integers(1, 60),
)
jobs = st.builds(
    Job,
    id=st.uuids().map(str),
    parameters=st.integers(10**5, 10**11),
    tokens_left=st.integers(1, 10**12),
    free_budget_uusd=st.integers(0, 10**10),
    min_islands=st.integers(1, 3),
    max_islands=st.integers(3, 8),
    gpus_per_island=st.none() | st.integers(1, 16),
    deadline_min=st.none() | st.integers(NOW - 5, NOW + 500),
)


@given(
    offered=st.lists(islands, max_size=8, unique_by=lambda island: island.id),
    wanted=st.lists(jobs, max_size=4, unique_by=lambda job: job.id),
)
def test_no_gpu_is_given_twice_and_no_budget_is_exceeded(offered: list[Island], wanted: list[Job]) -> None:
    decisions = decide(Market(NOW, (H100, L4), tuple(offered), tuple(wanted)))
    known = {island.id: island for island in offered}
    given_gpus: Counter[str] = Counter()
    committed_uusd: Counter[str] = Counter()
    seats: Counter[str] = Counter()
    for place in placed(decisions):
        island = known[place.island_id]
        assert place.until_min > NOW
        assert island.free_until_min is None or place.until_min <= island.free_until_min
        given_gpus[place.island_id] += place.gpus
        seats[place.job_id] += 1
        per_min = minute_cost_uusd(place.price_uusd_per_gpu_hour, place.gpus)
        committed_uusd[place.job_id] += per_min * (place.until_min - NOW)
    for island_id, count in given_gpus.items():
        assert count <= known[island_id].free_gpus
    for job in wanted:
        assert committed_uusd[job.id] <= job.free_budget_uusd
        assert seats[job.id] == 0 or job.min_islands <= seats[job.id] <= job.max_islands
