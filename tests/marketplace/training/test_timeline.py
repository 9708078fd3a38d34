"""The picture of islands in time: every mark inside it, in order, and saying what one row says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.training.timeline import (
    LEFT,
    RIGHT,
    ROUNDS_SHOWN,
    TICKS,
    WIDTH,
    Place,
    Work,
    clock,
    spark,
    timeline_of,
)

START = datetime(2026, 12, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def place(member: str = "a", *, since: float = 0, gone: float | None = None) -> Place:
    return Place(member, f"island {member}", at(since), at(since), None if gone is None else at(gone), "")


def work(
    number: int = 0,
    member: str = "a",
    *,
    opened: float = 0,
    submitted: float | None = 8,
    sealed: float | None = 10,
    compute: float | None = 5,
    upload: float = 1,
    accepted: bool | None = True,
    why: str = "",
) -> Work:
    return Work(
        member_id=member,
        number=number,
        opened_at=at(opened),
        sealed_at=None if sealed is None else at(sealed),
        compute_ms=None if compute is None else int(compute * 1000),
        upload_ms=int(upload * 1000),
        submitted_at=None if submitted is None else at(submitted),
        accepted=accepted,
        refused_why=why,
    )


def test_before_any_island_there_is_nothing_to_show() -> None:
    assert timeline_of([], [], now=START) is None


def test_a_round_is_training_then_sending_then_waiting() -> None:
    picture = timeline_of([place()], [work()], now=at(20))
    assert picture is not None
    train, send, wait = picture.lanes[0].bars
    assert [bar.kind for bar in (train, send, wait)] == ["train", "send", "wait"]
    assert train.x + train.width <= send.x
    assert send.x + send.width == pytest.approx(wait.x)
    assert [tick.label for tick in picture.seals] == ["round 0 sealed"]


def test_what_was_not_counted_is_one_bar_that_says_why() -> None:
    late = work(submitted=None, accepted=False, why="not_submitted")
    poisoned = work(1, opened=10, submitted=12, sealed=15, accepted=False, why="norm")
    picture = timeline_of([place()], [late, poisoned], now=at(20))
    assert picture is not None
    assert [(bar.kind, bar.title) for bar in picture.lanes[0].bars] == [
        ("refused", "round 0: not_submitted"),
        ("refused", "round 1: refused, norm"),
    ]


def test_what_is_not_reported_yet_trains_still_and_no_longer_than_its_island_is_there() -> None:
    going = work(submitted=None, sealed=None, accepted=None)
    picture = timeline_of([place(gone=10)], [going], now=at(20))
    assert picture is not None
    (bar,) = picture.lanes[0].bars
    assert bar.kind == "train"
    assert bar.x + bar.width == picture.lanes[0].gone_x


def test_of_a_long_run_the_last_rounds_are_shown_and_those_before_are_counted() -> None:
    works = [
        work(number, opened=10 * number, submitted=10 * number + 8, sealed=10 * number + 10) for number in range(70)
    ]
    picture = timeline_of([place(), place("b", gone=5)], works, now=at(700), rounds_before=1_000)
    assert picture is not None
    assert picture.rounds_hidden == 1_000 + 70 - ROUNDS_SHOWN
    assert len(picture.seals) == ROUNDS_SHOWN
    assert [lane.name for lane in picture.lanes] == ["island a"]


@given(
    span=st.integers(1, 10**7),
    parts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=8),
)
def test_every_mark_lies_inside_the_picture(span: int, parts: list[tuple[float, float, float, bool]]) -> None:
    works = []
    for number, (opened, submitted, sealed, accepted) in enumerate(parts):
        first, then, last = sorted((opened, submitted, sealed))
        works.append(work(number, opened=first * span, submitted=then * span, sealed=last * span, accepted=accepted))
    picture = timeline_of([place()], works, now=at(span))
    assert picture is not None
    inside = (LEFT, WIDTH - RIGHT + 0.5)
    for bar in picture.lanes[0].bars:
        assert inside[0] <= bar.x <= inside[1]
        assert bar.x + bar.width <= inside[1] + 0.5
    assert len(picture.ticks) <= TICKS + 1
    assert all(inside[0] <= tick.x <= inside[1] for tick in (*picture.ticks, *picture.seals))


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (65, "1:05"), (3_725, "1:02:05"), (9 * 86_400, "9 d"), (801_000, "9 d 6 h")]
)
def test_time_since_the_start_is_written_as_a_clock(seconds: int, shown: str) -> None:
    assert clock(seconds) == shown


def test_a_line_of_one_point_is_no_line_and_a_flat_one_is() -> None:
    assert spark([2.0]) == ""
    assert spark([2.0, 2.0, 2.0]).count("L") == 2
    assert spark([3.0, 1.0]) == "M2.0 2.0L118.0 26.0"
