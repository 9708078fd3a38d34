"""The speed formula on worked cases."""

from __future__ import annotations

import pytest

from scheduler.policy.state import Gpu
from scheduler.policy.throughput import (
    Replica,
    effective_tokens_per_s,
    exchange_s,
    fits_memory,
    model_tokens_per_s,
    replica_efficiency,
)

H100 = Gpu("h100-sxm-80g", 989.0, 80.0)


def test_a_7b_model_on_64_h100_makes_about_600_thousand_tokens_a_second() -> None:
    assert model_tokens_per_s(H100, 64, 7_000_000_000) == pytest.approx(602_819, rel=1e-3)


def test_a_70b_model_needs_the_memory_of_more_than_16_h100() -> None:
    assert not fits_memory(H100, 16, 70_000_000_000)
    assert fits_memory(H100, 32, 70_000_000_000)


def test_one_replica_loses_nothing_and_each_further_one_some_efficiency() -> None:
    efficiencies = [replica_efficiency(count, 7_000_000_000, 100) for count in (1, 2, 4, 8)]
    assert efficiencies == pytest.approx([1.0, 0.90, 0.81, 0.73], abs=0.01)


def test_one_island_exchanges_nothing() -> None:
    assert exchange_s([Replica(1e6)], 10**9, 4.0) == 0.0


def test_the_slowest_links_set_the_time_of_an_exchange() -> None:
    replicas = [Replica(1e6, 1000, 1000), Replica(1e6, 100, 200), Replica(1e6, 1000, 1000)]
    assert exchange_s(replicas, 10**9, 4.0) == pytest.approx(4e9 / 1e8 + 2 * 4e9 / 2e8)


def test_a_second_equal_island_makes_a_job_faster_and_less_than_twice_as_fast() -> None:
    def speed(count: int) -> float:
        return effective_tokens_per_s(
            [Replica(600_000, 5000, 5000)] * count,
            parameters=7_000_000_000,
            batch_tokens=1_000_000,
            inner_steps=100,
            bits_per_parameter=4.0625,
        )

    assert speed(1) == pytest.approx(600_000)
    assert speed(1) < speed(2) < 2 * speed(1)
