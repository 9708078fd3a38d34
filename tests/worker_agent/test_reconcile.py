from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.protocol import Assignment, TrainOrder
from worker_agent.reconcile import Action, Actual, Forget, Kill, Start, Stop, backoff_ms, reconcile

NOW = 50_000


def wanted(key: str = "a", generation: int = 1, **more: Any) -> Assignment:
    order = TrainOrder(job_id="j", member_id="m", generation=generation, member_token="t")
    fields: dict[str, Any] = {
        "kind": "train",
        "start_at_ms": 0,
        "stop_at_ms": 100_000,
        "train": order,
        "gpus": 1,
        **more,
    }
    return Assignment(id=key, generation=generation, **fields)


def actions(
    desired: list[Assignment],
    actual: dict[str, Actual],
    *,
    server_ms: int | None = NOW,
    may_start: bool = True,
    draining: bool = False,
) -> list[Action]:
    return reconcile(desired, actual, server_ms=server_ms, monotonic=NOW, may_start=may_start, draining=draining)


RUNS = Actual(generation=1, alive=True)


def test_what_is_wanted_and_absent_is_started() -> None:
    assert actions([wanted()], {}) == [Start(wanted())]


def test_what_runs_as_wanted_is_left_alone() -> None:
    assert actions([wanted()], {"a": RUNS}) == []


def test_what_is_not_listed_is_stopped_then_forgotten() -> None:
    assert [type(action) for action in actions([], {"a": RUNS})] == [Stop]
    assert actions([], {"a": Actual(generation=1, alive=False)}) == [Forget("a")]


def test_nothing_is_started_before_the_servers_time_or_word_is_known() -> None:
    assert actions([wanted()], {}, server_ms=None) == []
    assert actions([wanted()], {}, may_start=False) == []


def test_the_window_bounds_the_process() -> None:
    assert actions([wanted(start_at_ms=NOW + 1)], {}) == []
    assert actions([wanted(stop_at_ms=NOW)], {}) == []
    stop = actions([wanted(stop_at_ms=NOW)], {"a": RUNS})
    assert [(type(action), getattr(action, "reason", "")) for action in stop] == [(Stop, "deadline")]


def test_a_new_generation_waits_for_the_old_process_to_end() -> None:
    assert [type(action) for action in actions([wanted(generation=2)], {"a": RUNS})] == [Stop]
    ended = Actual(generation=1, alive=False, exit_code=0)
    assert actions([wanted(generation=2)], {"a": ended}) == [Start(wanted(generation=2))]


def test_a_stop_that_takes_too_long_becomes_a_kill() -> None:
    slow = Actual(generation=1, alive=True, stopping_since_ms=NOW - 10_000, stop_grace_ms=10_000)
    assert actions([], {"a": slow}) == [Kill("a")]
    assert actions([], {"a": Actual(generation=1, alive=True, stopping_since_ms=NOW - 10, stop_grace_ms=10_000)}) == []


def test_a_deadline_shortens_the_grace_of_a_drain() -> None:
    slow = Actual(generation=1, alive=True, stopping_since_ms=NOW - 11_000, stop_grace_ms=60_000)
    assert actions([wanted(drain=True)], {"a": slow}) == []
    assert actions([wanted(stop_at_ms=NOW)], {"a": slow}) == [Kill("a")]


def test_finished_work_is_not_started_again_and_failed_work_is_after_its_backoff() -> None:
    for code in (0, 3, 4):
        assert actions([wanted()], {"a": Actual(generation=1, alive=False, exit_code=code)}) == []
    failed = Actual(generation=1, alive=False, exit_code=1, failures=1, exited_at_ms=NOW - 1)
    assert actions([wanted()], {"a": failed}) == []
    assert actions([wanted()], {"a": replace(failed, exited_at_ms=NOW - 2000)}) == [Start(wanted())]


def test_backoff_grows_to_its_cap() -> None:
    assert [backoff_ms(n) for n in (0, 1, 2, 3, 99)] == [0, 2000, 4000, 8000, 300_000]


@given(
    listed=st.booleans(),
    kind=st.sampled_from(["train", "reserve"]),
    drain=st.booleans(),
    alive=st.one_of(st.none(), st.booleans()),
    generation=st.integers(1, 2),
    stop_at=st.integers(0, 100_000),
    draining=st.booleans(),
)
def test_there_is_never_a_second_process_nor_one_that_is_not_wanted(
    listed: bool, kind: str, drain: bool, alive: bool | None, generation: int, stop_at: int, draining: bool
) -> None:
    desired = [wanted(kind=kind, drain=drain, stop_at_ms=stop_at)] if listed else []
    actual = {} if alive is None else {"a": Actual(generation=generation, alive=alive, exit_code=None if alive else 1)}
    result = actions(desired, actual, draining=draining)
    starts = [action for action in result if isinstance(action, Start)]
    may_run = listed and kind == "train" and not drain and not draining and stop_at > NOW
    if starts:
        assert may_run
        assert not alive
    if alive and not (may_run and generation == 1):
        assert any(isinstance(action, Stop) for action in result)
