from __future__ import annotations

from marketplace.liveness import BUSY_LIMIT_S, STUCK_AFTER_S, Progress, is_stuck


def test_a_process_with_nothing_waiting_is_never_stuck() -> None:
    assert not is_stuck(Progress(0.0), now_s=10 * BUSY_LIMIT_S, waiting=0)


def test_work_that_waits_while_none_is_taken_means_stuck() -> None:
    assert not is_stuck(Progress(0.0), now_s=STUCK_AFTER_S, waiting=5)
    assert is_stuck(Progress(0.0), now_s=STUCK_AFTER_S + 1, waiting=5)


def test_a_process_at_work_is_given_more_time() -> None:
    assert not is_stuck(Progress(0.0, in_hand=1), now_s=STUCK_AFTER_S + 1, waiting=5)
    assert is_stuck(Progress(0.0, in_hand=1), now_s=BUSY_LIMIT_S + 1, waiting=5)
