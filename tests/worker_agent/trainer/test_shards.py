"""Who reads which window: nothing twice in an epoch, whoever joins, leaves or is slow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.protocol import RoundOrder
from worker_agent.trainer.shards import Permutation, Shard, window_at


@given(st.integers(1, 3000), st.text(max_size=8))
def test_a_permutation_hits_each_window_once(size: int, key: str) -> None:
    assert sorted(Permutation.of(size, key)(np.arange(size))) == list(range(size))


def test_a_permutation_is_the_same_on_every_machine() -> None:
    assert Permutation.of(1000, "7/0")(np.arange(8)).tolist() == [561, 638, 713, 291, 857, 895, 897, 372]
    assert Permutation.of(10**12, "7/0")(np.array([0, 10**12 - 1])).tolist() == [911386886463, 621841539817]


def test_epochs_and_seeds_order_the_text_differently() -> None:
    orders = {
        tuple(window_at(np.arange(100) + 100 * epoch, seed=seed, windows=100))
        for epoch in range(3)
        for seed in range(3)
    }
    assert len(orders) == 9


def test_a_place_outside_the_text_is_an_error() -> None:
    with pytest.raises(IndexError):
        Permutation.of(10, "k")(np.array([10]))


@given(
    st.integers(20, 400),
    st.integers(1, 4),
    st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5), min_size=1, max_size=8),
)
def test_ranges_from_one_counter_never_give_a_window_twice_within_an_epoch(
    windows: int, per_step: int, rounds: list[list[tuple[int, int]]]
) -> None:
    """Each member is ordered some steps and does fewer, or more members come: the counter only goes on."""
    context, cursor = 16, 0
    read: dict[int, list[int]] = {}
    for number, members in enumerate(rounds):
        for slot, (steps, done) in enumerate(members):
            order = RoundOrder(
                round=number,
                steps=steps,
                tokens_before=0,
                data_slot=slot,
                data_slots=len(members),
                deadline_ms=0,
                data_start=cursor,
            )
            shard = Shard.of(order, seed=3, windows=windows, windows_per_step=per_step, context=context)
            for step in range(min(done, steps)):
                first = cursor // context + step * per_step
                for place, window in zip(range(first, first + per_step), shard.windows_of(step).tolist(), strict=True):
                    read.setdefault(place // windows, []).append(window)
            with pytest.raises(IndexError):
                shard.windows_of(steps)
            cursor += steps * per_step * context
    for seen in read.values():
        assert len(set(seen)) == len(seen)


@given(st.integers(1, 6), st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(0, 50))
def test_without_a_counter_the_slots_of_a_round_share_no_window(
    per_step: int, steps_by_slot: list[int], start: int
) -> None:
    windows, context, slots = 400, 16, len(steps_by_slot)
    seen: list[int] = []
    for slot, steps in enumerate(steps_by_slot):
        order = RoundOrder(
            round=0, steps=8, tokens_before=start * context, data_slot=slot, data_slots=slots, deadline_ms=0
        )
        shard = Shard.of(order, seed=3, windows=windows, windows_per_step=per_step, context=context)
        for step in range(steps):
            seen.extend(shard.windows_of(step).tolist())
    assert len(set(seen)) == len(seen)


def test_without_a_counter_rounds_of_equal_steps_follow_on_each_other_without_gap_or_overlap() -> None:
    seen: list[int] = []
    for number in range(5):
        for slot in range(2):
            order = RoundOrder(
                round=number,
                steps=5,
                tokens_before=number * 2 * 5 * 2 * 16,
                data_slot=slot,
                data_slots=2,
                deadline_ms=0,
            )
            shard = Shard.of(order, seed=9, windows=100, windows_per_step=2, context=16)
            for step in range(5):
                seen.extend(shard.windows_of(step).tolist())
    assert sorted(seen) == list(range(100))
