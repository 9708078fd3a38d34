from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from marketplace.trading.positions import Busy, Step, earliest, free_slots, free_until, levels, lowest

MINUTES = 20
steps = st.lists(
    st.builds(
        lambda a, length, delta: Step(a, a + length, delta), st.integers(0, 15), st.integers(1, 9), st.integers(-3, 3)
    ),
    max_size=8,
)
busy = st.lists(
    st.builds(
        lambda slot, a, length: Busy(slot, a, a + length), st.integers(0, 3), st.integers(0, 15), st.integers(1, 6)
    ),
    max_size=6,
)


@given(steps, st.integers(0, 10), st.integers(1, 10))
def test_levels_say_for_every_minute_what_the_steps_sum_to(found: list[Step], start: int, length: int) -> None:
    pieces = levels(found, start, start + length)
    told = [piece.delta for piece in pieces for _ in range(piece.start_min, piece.end_min)]
    counted = [
        sum(step.delta for step in found if step.start_min <= minute < step.end_min)
        for minute in range(start, start + length)
    ]
    assert told == counted
    assert all(one.delta != two.delta for one, two in itertools.pairwise(pieces))
    assert lowest(found, start, start + length) == min(counted)


@given(busy, st.integers(0, 12), st.integers(1, 8))
def test_a_free_slot_is_held_in_no_minute_of_the_window(held: list[Busy], start: int, length: int) -> None:
    taken = {
        slot
        for slot in range(4)
        for each in held
        if each.slot == slot and any(each.start_min <= minute < each.end_min for minute in range(start, start + length))
    }
    assert sorted(free_slots(4, held, start, start + length)) == sorted(set(range(4)) - taken)


@given(busy, st.integers(0, 12))
def test_a_slot_is_free_until_the_minute_in_which_it_is_next_held(held: list[Busy], start: int) -> None:
    ends = free_until(4, held, start)
    assert len(ends) == len(free_slots(4, held, start, start + 1))
    first = earliest(ends)
    if ends and first is not None:
        assert len(free_slots(4, held, start, first)) == len(ends)
        assert len(free_slots(4, held, start, first + 1)) < len(ends)


def test_the_tightest_fit_is_taken_first_so_that_long_stretches_stay_whole() -> None:
    held = [Busy(1, 60, 90), Busy(2, 10, 20), Busy(2, 30, 60)]
    assert free_slots(4, held, 20, 30) == [2, 1, 0, 3]
