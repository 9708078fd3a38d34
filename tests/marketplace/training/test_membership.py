"""A job's places: taken once, fenced by generation, restarted once a failure, asked to leave, and gone."""

from __future__ import annotations

import pytest

from marketplace.core.errors import Conflict, Unauthorised
from marketplace.fleet import hooks
from marketplace.fleet.models import Agent
from marketplace.training.models import Job, JobEvent, JobState, Member, MemberState
from marketplace.training.services import drain_member, place_member
from marketplace.training.services.membership import (
    FAILURES_MAX,
    live_members,
    member_gone,
    member_token,
    next_generation,
    read_token,
)
from tests.marketplace.trading.market import make_agent
from tests.marketplace.training.crew import START, at, crew, make_job, make_lease
from worker_agent.protocol import ProcessReport

pytestmark = pytest.mark.django_db


def kinds(job: Job) -> list[str]:
    return list(JobEvent.objects.filter(job=job).order_by("pk").values_list("kind", flat=True))


def placed() -> Member:
    job = make_job()
    return place_member(job, make_lease(job), START, "the test says so")


def agent_of(member: Member) -> Agent:
    return make_agent(member.lease.island)


def report(
    member: Member, state: str = "failed", *, generation: int | None = None, exit_code: int = 1
) -> ProcessReport:
    return ProcessReport(
        assignment_id=member.lease_id,
        generation=member.generation if generation is None else generation,
        state=state,  # type: ignore[arg-type]
        exit_code=exit_code,
        message="exit code 1: out of memory",
    )


def test_the_same_lease_is_the_same_place() -> None:
    job = make_job()
    lease = make_lease(job)
    first, again = (place_member(job, lease, START, "why") for _ in range(2))
    assert first == again
    assert kinds(job) == ["placed"]


def test_a_lease_of_another_job_and_a_job_that_ended_are_no_place() -> None:
    job = make_job()
    with pytest.raises(Conflict, match="not this job's"):
        place_member(job, make_lease(make_job()), START, "why")
    Job.objects.filter(pk=job.pk).update(state=JobState.CANCELLED)
    job.refresh_from_db()
    with pytest.raises(Conflict, match="has ended"):
        place_member(job, make_lease(job), START, "why")
    assert not Member.objects.filter(job=job).exists()


def test_a_token_says_which_place_and_which_generation_and_cannot_be_made_up() -> None:
    member = placed()
    token = member_token(member)
    assert read_token(token) == (member.pk, 1)
    for made_up in ("", "x", token[:-1] + "~", f"{member.pk}:1", token.replace(":1:", ":2:")):
        with pytest.raises(Unauthorised):
            read_token(made_up)


def test_a_failure_is_one_restart_however_often_it_is_reported() -> None:
    member = placed()
    agent = agent_of(member)
    for _ in range(3):
        hooks.take_processes(agent, [report(member)], at(1_000))
    again = Member.objects.get(pk=member.pk)
    assert (again.generation, again.restarts, again.failure_code) == (2, 1, 1)
    assert again.failure == "exit code 1: out of memory"
    assert kinds(member.job) == ["placed", "restarted"]


def test_what_an_old_generation_reports_changes_nothing() -> None:
    member = placed()
    next_generation(member, "it ended", at(0))
    hooks.take_processes(agent_of(member), [report(member, generation=1)], at(1_000))
    assert Member.objects.get(pk=member.pk).generation == 2


def test_an_agent_speaks_for_its_own_island_alone() -> None:
    member, other = placed(), placed()
    hooks.take_processes(agent_of(other), [report(member)], at(1_000))
    assert Member.objects.get(pk=member.pk).generation == 1


def test_a_place_where_trainers_fail_in_a_row_is_given_up() -> None:
    member = placed()
    for _ in range(FAILURES_MAX):
        assert next_generation(Member.objects.select_related("lease__island").get(pk=member.pk), "no memory", at(0))
    gone = Member.objects.get(pk=member.pk)
    assert (gone.state, gone.restarts) == (MemberState.GONE, FAILURES_MAX)
    assert gone.gone_why == f"its trainer failed {FAILURES_MAX} times in a row, the last time: no memory"
    assert live_members(member.job_id) == []
    assert not next_generation(gone, "again", at(0))


def test_one_that_is_asked_to_leave_is_asked_once() -> None:
    job = make_job()
    (trainer,) = crew(job, 1)
    for _ in range(2):
        assert drain_member(trainer.member.pk, "its lease ends", at(0)).state == MemberState.DRAINING
    assert kinds(job).count("draining") == 1


def test_one_that_never_joined_is_gone_when_it_is_asked_to_leave() -> None:
    member = placed()
    assert drain_member(member.pk, "its lease ends", at(0)).state == MemberState.GONE


def test_the_end_of_one_that_was_to_leave_is_no_failure() -> None:
    job = make_job()
    (trainer,) = crew(job, 1)
    member = trainer.row
    drain_member(member.pk, "its lease ends", at(0))
    hooks.take_processes(agent_of(member), [report(member, "exited", exit_code=0)], at(1_000))
    assert Member.objects.get(pk=member.pk).state == MemberState.GONE
    assert kinds(job)[-1] == "left"


def test_who_is_gone_is_gone_once_and_for_good() -> None:
    member = placed()
    assert member_gone(member.pk, "its island is lost", at(0))
    assert not member_gone(member.pk, "again", at(1))
    assert Member.objects.get(pk=member.pk).gone_why == "its island is lost"
    assert kinds(member.job) == ["placed", "lost"]
