"""What the scheduler does as islands, leases, prices and money come and go: each within one tick."""

from __future__ import annotations

from datetime import timedelta

import pytest

from marketplace.billing.ledger import balance_uusd
from marketplace.billing.services.holds import cash, escrow
from marketplace.core.clock import database_now, minute_of, minute_start
from marketplace.fleet.models import Island, IslandState
from marketplace.trading.models import Lease, LeaseState
from marketplace.trading.services import extend
from marketplace.training.models import Artifact, Job, JobEvent, JobState, Member, MemberState, Round
from marketplace.training.selectors import money_of
from marketplace.training.services import cancel_job
from tests.scheduler.scene import USD, customer, island, job, live_leases, lose, placed, start, state_of, sweep, tick

pytestmark = pytest.mark.django_db


def test_a_job_waits_until_an_island_is_online_and_takes_it_in_the_next_tick() -> None:
    wanted = job(customer())
    tick()
    assert live_leases(wanted) == []
    assert Job.objects.get(pk=wanted.pk).reason == "no free island has the GPUs this job allows"

    island()
    tick()
    (lease,) = live_leases(wanted)
    assert lease.gpus == 8
    assert Member.objects.get(lease=lease).state == MemberState.ASSIGNED
    assert JobEvent.objects.filter(job=wanted, kind="placed").exists()


def test_what_the_job_rents_is_paid_from_its_budget_and_never_beyond() -> None:
    actor = customer()
    island(), island()
    wanted = job(actor)
    tick()
    money = money_of([wanted])[wanted.pk]
    assert len(live_leases(wanted)) == 2
    assert money.committed_uusd > 0
    assert money.spent_uusd + money.committed_uusd + money.free_uusd == money.budget_uusd == 900 * USD


def test_a_lost_island_fails_its_lease_frees_its_money_and_is_replaced_in_the_same_tick() -> None:
    wanted = job(customer(), max_islands=1)
    first = island()
    tick()
    (lease,) = live_leases(wanted)
    start(Member.objects.get(lease=lease))
    island()
    lose(first)
    tick()

    lease.refresh_from_db()
    assert (lease.state, lease.end_reason) == (LeaseState.FAILED, "island_lost")
    assert Member.objects.get(lease=lease).state == MemberState.GONE
    tick()
    (replacement,) = live_leases(wanted)
    assert replacement.island_id != first.pk


def test_a_lease_near_its_end_is_extended_while_the_price_stands() -> None:
    wanted = job(customer(), max_islands=1)
    lease = placed(wanted, island(), minutes=3)
    tick()
    lease.refresh_from_db()
    assert lease.end_min > minute_of(database_now()) + 10


def test_a_lease_is_not_extended_at_a_price_that_was_raised() -> None:
    wanted = job(customer(), max_islands=1)
    dear = island()
    lease = placed(wanted, dear, minutes=3)
    end_min = lease.end_min
    Island.objects.filter(pk=dear.pk).update(price_uusd_per_gpu_hour=6_000_000)
    tick()
    assert Lease.objects.get(pk=lease.pk).end_min == end_min


def test_an_island_that_is_not_listed_or_suspect_is_not_taken() -> None:
    wanted = job(customer())
    island(listed=False), island(state=IslandState.SUSPECT)
    tick()
    assert live_leases(wanted) == []


def test_a_budget_that_cannot_finish_takes_nothing_and_says_so_once() -> None:
    wanted = job(customer(), budget_uusd=1 * USD)
    island()
    tick()
    tick()
    assert live_leases(wanted) == []
    assert JobEvent.objects.filter(job=wanted, kind="decision").count() == 1
    assert "is free" in Job.objects.get(pk=wanted.pk).reason


def test_a_job_that_began_and_can_no_longer_be_paid_is_stopped_and_gets_its_rest_back() -> None:
    actor = customer(dollars=5)
    wanted = job(actor, budget_uusd=5 * USD)
    Job.objects.filter(pk=wanted.pk).update(rounds_sealed=3, state=JobState.WAITING)
    island()
    tick()
    sweep()
    assert state_of(wanted) == JobState.STOPPED
    assert balance_uusd(cash(actor.organisation)) == 5 * USD
    assert balance_uusd(escrow(wanted.pk, actor.organisation)) == 0


def test_past_its_deadline_a_job_is_stopped_and_its_islands_are_given_back() -> None:
    wanted = job(customer(), deadline_at=(database_now() + timedelta(hours=30)).isoformat())
    island()
    tick()
    assert live_leases(wanted)
    Job.objects.filter(pk=wanted.pk).update(deadline_at=database_now() - timedelta(seconds=1))
    sweep()
    assert state_of(wanted) == JobState.STOPPED
    assert live_leases(wanted) == []


def test_a_job_runs_when_a_trainer_has_joined_and_waits_when_none_is_left() -> None:
    wanted = job(customer(), max_islands=1)
    only = island()
    tick()
    sweep()
    assert state_of(wanted) == JobState.QUEUED
    start(Member.objects.get(job=wanted))
    sweep()
    assert state_of(wanted) == JobState.RUNNING
    lose(only)
    tick()
    sweep()
    assert state_of(wanted) == JobState.WAITING


def test_cancelling_gives_islands_back_and_the_whole_rest_once_they_are_settled() -> None:
    actor = customer()
    wanted = job(actor)
    island()
    tick()
    cancel_job(actor, wanted.pk, database_now())
    assert live_leases(wanted) == []
    Lease.objects.filter(job_ref=wanted.pk, settled_at=None).update(settle_at=database_now())
    sweep()
    assert balance_uusd(cash(actor.organisation)) == 1_000 * USD
    assert Job.objects.get(pk=wanted.pk).settled_at is not None


def test_a_member_asked_to_leave_that_does_not_is_let_go_after_its_limit() -> None:
    wanted = job(customer(), max_islands=1)
    island()
    tick()
    member = Member.objects.get(job=wanted)
    Member.objects.filter(pk=member.pk).update(
        state=MemberState.DRAINING, draining_since=database_now() - timedelta(minutes=2)
    )
    sweep()
    member.refresh_from_db()
    assert member.state == MemberState.GONE
    assert not live_leases(wanted)


def test_a_trainer_that_never_joins_is_given_up() -> None:
    wanted = job(customer(), max_islands=1)
    island()
    tick()
    Member.objects.filter(job=wanted).update(created_at=database_now() - timedelta(minutes=10))
    sweep()
    assert "did not join" in Member.objects.get(job=wanted).gone_why
    assert not live_leases(wanted)


def test_a_finished_run_succeeds_once_its_last_state_is_stored_and_its_trainers_left() -> None:
    actor = customer()
    wanted = job(actor, max_islands=1)
    island()
    tick()
    Job.objects.filter(pk=wanted.pk).update(state=JobState.FINISHING, rounds_sealed=2, state_since=database_now())
    sweep()
    assert state_of(wanted) == JobState.FINISHING
    Artifact.objects.create(
        organisation=actor.organisation,
        job=wanted,
        kind="snapshot",
        digest="0" * 64,
        size_bytes=1,
        created_at=database_now(),
        stored_at=database_now(),
        round_number=2,
    )
    Member.objects.filter(job=wanted).update(state=MemberState.GONE)
    sweep()
    assert state_of(wanted) == JobState.SUCCEEDED
    assert not live_leases(wanted)
    assert not Round.objects.filter(job=wanted).exists()


def test_extending_to_the_same_end_changes_nothing() -> None:
    wanted = job(customer(), max_islands=1)
    island()
    tick()
    (lease,) = live_leases(wanted)
    extend(lease.pk, end_at=minute_start(lease.end_min), by="test", now=database_now())
    assert live_leases(wanted)[0].end_min == lease.end_min
