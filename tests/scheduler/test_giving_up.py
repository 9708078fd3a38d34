"""What fails is tried again where that can help, elsewhere where it cannot, and ended before it eats the budget."""

from __future__ import annotations

import pytest

from marketplace.core.clock import database_now
from marketplace.trading.models import LeaseState
from marketplace.training.models import Job, JobState, Member, MemberState, Round, RoundState
from marketplace.training.selectors import money_of
from marketplace.training.services.jobs import FAILURES_IN_ALL
from marketplace.training.services.membership import FAILURES_MAX, next_generation
from tests.scheduler.scene import customer, island, job, live_leases, placed, state_of, sweep, tick
from worker_agent.protocol import EXIT_ERROR, EXIT_SPEC, EXIT_UNREACHABLE

pytestmark = pytest.mark.django_db

SPEC_WORDS = "exit code 6: SpecError: model.entry: cannot be imported: no module named 'mine'"


def fail(of: Job, exit_code: int, *, times: int = 1, words: str = "exit code 1: RuntimeError: no") -> None:
    for _ in range(times):
        member = Member.objects.exclude(state=MemberState.GONE).filter(job=of).select_related("lease__island").get()
        next_generation(member, words, database_now(), exit_code=exit_code)


def seal(of: Job) -> None:
    now = database_now()
    Round.objects.create(
        job=of,
        number=0,
        state=RoundState.SEALED,
        opened_at=now,
        deadline_at=now,
        sealed_at=now,
        tokens_before=0,
        manifest={},
    )


def test_what_cannot_be_trained_is_tried_twice_and_ended_with_the_words_of_the_trainer() -> None:
    wanted = job(customer(), max_islands=1)
    placed(wanted, island(), minutes=30)
    fail(wanted, EXIT_SPEC, words=SPEC_WORDS)
    sweep()
    assert state_of(wanted) == JobState.QUEUED
    fail(wanted, EXIT_SPEC, words=SPEC_WORDS)
    sweep()
    wanted.refresh_from_db()
    assert wanted.state == JobState.FAILED
    assert wanted.reason == f"what was submitted cannot be trained: {SPEC_WORDS}"
    assert live_leases(wanted) == []
    money = money_of([wanted])[wanted.pk]
    assert money.spent_uusd == 0


def test_an_island_that_refuses_what_trains_elsewhere_does_not_end_the_job() -> None:
    wanted = job(customer(), max_islands=1)
    placed(wanted, island(), minutes=30)
    seal(wanted)
    fail(wanted, EXIT_SPEC, times=FAILURES_MAX - 1)
    sweep()
    assert state_of(wanted) in (JobState.QUEUED, JobState.RUNNING)


def test_an_island_where_trainers_fail_again_and_again_is_left_and_not_taken_again() -> None:
    wanted = job(customer(), max_islands=1)
    bad = island()
    lease = placed(wanted, bad, minutes=30)
    fail(wanted, EXIT_ERROR, times=FAILURES_MAX)
    tick()
    sweep()
    lease.refresh_from_db()
    assert lease.state == LeaseState.ENDED
    tick()
    assert live_leases(wanted) == []
    good = island()
    tick()
    assert [each.island_id for each in live_leases(wanted)] == [good.pk]


def test_a_job_whose_trainers_fail_everywhere_is_ended() -> None:
    wanted = job(customer(), max_islands=1)
    left = FAILURES_IN_ALL
    while left > 0:
        placed(wanted, island(), minutes=30)
        fail(wanted, EXIT_ERROR, times=min(left, FAILURES_MAX))
        left -= FAILURES_MAX
        tick()
        sweep()
    wanted.refresh_from_db()
    assert wanted.state == JobState.FAILED
    assert wanted.reason.startswith(f"its trainers failed {FAILURES_IN_ALL} times without a round between")


def test_failures_before_a_round_that_counted_are_forgotten() -> None:
    wanted = job(customer(), max_islands=1)
    for _ in range(FAILURES_IN_ALL // FAILURES_MAX + 1):
        placed(wanted, island(), minutes=30)
        fail(wanted, EXIT_ERROR, times=FAILURES_MAX)
    seal(wanted)
    sweep()
    assert state_of(wanted) != JobState.FAILED


def test_a_control_plane_that_was_away_ends_no_job() -> None:
    wanted = job(customer(), max_islands=1)
    for _ in range(FAILURES_IN_ALL // FAILURES_MAX + 1):
        placed(wanted, island(), minutes=30)
        fail(wanted, EXIT_UNREACHABLE, times=FAILURES_MAX)
    sweep()
    assert state_of(wanted) != JobState.FAILED
