"""A job's life and its money: what is spent, committed and free is the budget, at every step."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marketplace.accounts.access import Actor
from marketplace.accounts.models import AuditEvent, Role
from marketplace.billing.invariants import breaches
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.services.holds import cash
from marketplace.core.clock import database_now
from marketplace.core.errors import Forbidden, InsufficientFunds, NotFound
from marketplace.fleet import hooks
from marketplace.fleet.models import Island
from marketplace.trading.models import Lease, LeaseState
from marketplace.trading.services import end_lease, sweep_leases
from marketplace.training.models import Job, JobEvent, JobState, Member, MemberState
from marketplace.training.selectors import money_of
from marketplace.training.services import advance_jobs, cancel_job, submit_job
from marketplace.training.spec import JobSpecForm
from tests.marketplace.trading.market import charge_counted, make_agent
from tests.marketplace.training.people import USD, asked, customer
from tests.scheduler.scene import island, placed

pytestmark = pytest.mark.django_db


def submitted(actor: Actor, **more: object) -> Job:
    now = database_now()
    form = JobSpecForm(data=asked(**more), context={"now": now})
    form.is_valid(raise_exception=True)
    return submit_job(actor, form.validated_data, now)


def adds_up(job: Job) -> bool:
    money = money_of([job])[job.pk]
    return money.spent_uusd + money.committed_uusd + money.free_uusd == job.budget_uusd


def test_submitting_holds_the_budget_and_is_written_down() -> None:
    actor = customer()
    job = submitted(actor)
    assert (job.state, balance_uusd(cash(actor.organisation))) == (JobState.QUEUED, 80 * USD)
    assert adds_up(job)
    assert AuditEvent.objects.filter(action="job.submitted", object_id=job.pk).exists()
    assert JobEvent.objects.get(job=job).message == "Submitted; $20.00 are held for it"


def test_what_cannot_be_held_leaves_no_job() -> None:
    actor = customer(dollars=10)
    with pytest.raises(InsufficientFunds):
        submitted(actor)
    assert not Job.objects.exists()
    assert balance_uusd(cash(actor.organisation)) == 10 * USD


def test_who_may_only_look_submits_and_cancels_nothing() -> None:
    actor = customer()
    job = submitted(actor)
    viewer = Actor(actor.organisation, Role.VIEWER, "user:2")
    with pytest.raises(Forbidden):
        submitted(viewer)
    with pytest.raises(Forbidden):
        cancel_job(viewer, job.pk, database_now())
    with pytest.raises(NotFound):
        cancel_job(customer(), job.pk, database_now())


def test_a_job_cancelled_before_it_began_gets_all_of_it_back_at_the_next_sweep() -> None:
    actor = customer()
    job = submitted(actor)
    cancel_job(actor, job.pk, database_now())
    cancel_job(actor, job.pk, database_now())
    advance_jobs(database_now())
    advance_jobs(database_now())
    assert balance_uusd(cash(actor.organisation)) == 100 * USD
    assert list(JobEvent.objects.filter(job=job).order_by("pk").values_list("kind", flat=True)) == [
        "submitted",
        "ended",
        "settled",
    ]


def test_a_job_past_its_deadline_is_stopped_with_what_is_sealed() -> None:
    job = submitted(customer(), deadline_at=(database_now() + timedelta(hours=1)).isoformat())
    advance_jobs(database_now())
    assert Job.objects.get(pk=job.pk).state == JobState.QUEUED
    advance_jobs(database_now() + timedelta(hours=2))
    stopped = Job.objects.get(pk=job.pk)
    assert (stopped.state, "deadline" in stopped.reason) == (JobState.STOPPED, True)


def test_a_lease_that_ends_under_a_job_returns_to_the_job_and_not_to_cash() -> None:
    actor = customer()
    job = submitted(actor)
    lease = placed(job, island(), minutes=5)
    assert adds_up(job)
    assert money_of([job])[job.pk].committed_uusd > 0
    end_lease(lease.pk, reason="released", by="test", now=database_now())
    sweep_leases(database_now() + timedelta(minutes=10))
    money = money_of([job])[job.pk]
    assert (money.committed_uusd, money.free_uusd) == (0, 20 * USD)
    assert balance_uusd(cash(actor.organisation)) == 80 * USD


def deliver(lease: Lease, held: Island, seconds: int) -> None:
    agent = make_agent(held)
    for each in range(0, seconds + 1, 10):
        hooks.observe_beat(agent, lease.created_at + timedelta(seconds=each))
    charge_counted(agent, lease, seconds * 1_000 * lease.gpus, lease.created_at + timedelta(seconds=seconds))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 900), st.booleans()), min_size=1, max_size=4))
def test_spent_committed_and_free_are_the_budget_whatever_happens(steps: list[tuple[int, int, bool]]) -> None:
    actor = customer(dollars=1_000)
    job = submitted(actor, budget_uusd=900 * USD)
    for minutes, seconds, gives_back in steps:
        held = island(gpu_count=2)
        lease = placed(job, held, minutes=minutes)
        assert adds_up(job)
        deliver(lease, held, seconds)
        assert adds_up(job)
        if gives_back:
            end_lease(lease.pk, reason="released", by="test", now=database_now())
            assert adds_up(job)
    sweep_leases(database_now() + timedelta(minutes=1))
    assert adds_up(job)
    spent_uusd = money_of([job])[job.pk].spent_uusd
    cancel_job(actor, job.pk, database_now())
    sweep_leases(database_now() + timedelta(hours=1))
    advance_jobs(database_now() + timedelta(hours=1))
    assert not Lease.objects.filter(job_ref=job.pk).exclude(state__in=[LeaseState.ENDED, LeaseState.CANCELLED]).exists()
    assert not Member.objects.filter(job=job).exclude(state=MemberState.GONE).exists()
    assert balance_uusd(cash(actor.organisation)) == 1_000 * USD - money_of([job])[job.pk].spent_uusd
    assert money_of([job])[job.pk].spent_uusd >= spent_uusd
    assert breaches() == []
