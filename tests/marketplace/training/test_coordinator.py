"""The rounds of a run as its members meet them: every answer follows from rows and clock."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from marketplace.core.errors import Conflict, Gone, InvalidInput, Unauthorised
from marketplace.training.models import Job, JobEvent, JobState, Member, MemberState, Round, RoundState
from marketplace.training.services import coordinator
from marketplace.training.services.membership import drain_member, member_gone, next_generation, read_token
from marketplace.training.services.rounds import sweep_rounds
from tests.marketplace.training.crew import (
    DEADLINE_MS,
    GRACE_MS,
    NUMEL,
    STEP_TOKENS,
    Trainer,
    advance_all,
    at,
    crew,
    make_job,
    make_lease,
    manifest,
    opened,
    seat,
    state,
)
from worker_agent.protocol import JoinRequest, PollRequest

pytestmark = pytest.mark.django_db


def test_round_0_opens_when_all_assigned_members_are_ready() -> None:
    one, two = crew(make_job(), 2)
    assert one.poll(0).command == "wait"
    reply = two.poll(0)
    assert reply.command == "train"
    assert reply.order is not None
    assert (reply.order.round, reply.order.data_slots, reply.order.tokens_before) == (0, 2, 0)
    assert one.poll(0).command == "train"


def test_round_0_waits_for_a_member_on_its_way_and_no_longer_than_a_round() -> None:
    job = make_job()
    one, _two = crew(job, 2, joined=False)
    one.join()
    assert one.poll(0, DEADLINE_MS - 1).command == "wait"
    assert one.poll(0, DEADLINE_MS).command == "train"


def test_a_run_below_its_least_islands_does_not_begin_before_the_wait_is_over() -> None:
    (one,) = crew(make_job(min_islands=2), 1)
    assert one.poll(0, 5_000).command == "wait"
    assert one.poll(0, DEADLINE_MS).command == "train"


def test_a_sealed_round_opens_the_next_for_all_that_are_there() -> None:
    job = make_job()
    trainers = opened(job, 2)
    for trainer in trainers:
        assert trainer.submit(0, 1_000).accepted
    job.refresh_from_db()
    assert (job.rounds_sealed, job.tokens_sealed) == (1, 2 * STEP_TOKENS)
    assert Round.objects.get(job=job, state=RoundState.OPEN).seats.count() == 2
    reply = trainers[0].poll(0, 1_000, phase="submitted")
    assert reply.command == "apply"
    assert reply.manifest == manifest(job, 0)
    assert [entry.member_id for entry in manifest(job, 0).entries] == [t.member.pk for t in trainers]
    assert trainers[0].poll(1, 1_100).command == "train"


def test_a_late_joiner_takes_the_newest_snapshot_and_the_manifests_since_and_part_from_the_next_round() -> None:
    job = make_job()
    trainers = opened(job, 2)
    advance_all(trainers, 0)
    ref = trainers[0].snapshot(1)
    advance_all(trainers, 1)
    (late,) = crew(job, 1)
    reply = late.join(100)
    assert reply.snapshot == ref
    assert (reply.snapshot_round, reply.snapshot_state_digest) == (1, state(1))
    assert [each.round for each in reply.manifests] == [1]
    assert reply.run.job_id == job.pk
    assert late.poll(2, 200).command == "wait"
    advance_all(trainers, 2, 300)
    assert late.poll(2, 400).command == "apply"
    assert late.poll(3, 400).command == "train"


def test_a_member_killed_in_a_round_costs_its_grace_and_is_not_waited_for_again() -> None:
    job = make_job()
    one, two, three = opened(job, 3)
    one.submit(0, 1_000)
    two.submit(0, 1_500)
    assert one.poll(0, 1_500 + GRACE_MS - 1, phase="submitted").command == "wait"
    assert one.poll(0, 20_000, phase="submitted").command == "apply"
    assert [refusal.reason for refusal in manifest(job, 0).refused] == ["not_submitted"]
    seated = Round.objects.get(job=job, number=1).seats.values_list("member_id", flat=True)
    # Two had not been heard of for as long as three, but was counted.
    assert set(seated) == {one.member.pk, two.member.pk}
    assert three.member.pk not in seated


def test_whoever_was_counted_a_moment_ago_takes_part_in_the_next_round() -> None:
    job = make_job()
    one, two = opened(job, 2)
    one.submit(0, 1_000)
    two.submit(0, 30_000)
    assert Round.objects.get(job=job, number=1).seats.count() == 2
    assert one.poll(0, 30_000, phase="submitted").command == "apply"


def test_a_member_that_is_gone_is_not_waited_for() -> None:
    job = make_job()
    one, two = opened(job, 2)
    one.submit(0, 1_000)
    assert one.poll(0, 1_100, phase="submitted").command == "wait"
    member_gone(two.member.pk, "its island is lost", at(1_200))
    assert one.poll(0, 1_300, phase="submitted").command == "apply"
    assert [refusal.reason for refusal in manifest(job, 0).refused] == ["lost"]


def test_a_round_at_its_deadline_is_sealed_with_what_is_there_also_when_nobody_polls() -> None:
    job = make_job(quorum=0.9)
    one, *_ = opened(job, 3)
    one.submit(0, 1_000)
    assert sweep_rounds(at(DEADLINE_MS - 1)) == 0
    assert sweep_rounds(at(DEADLINE_MS + 1)) == 1
    assert [entry.member_id for entry in manifest(job, 0).entries] == [one.member.pk]


def test_a_round_nobody_submitted_to_begins_again_with_who_is_there() -> None:
    job = make_job()
    one, two = opened(job, 2)
    before = seat(one, 0)
    reply = one.poll(0, DEADLINE_MS)
    current = Round.objects.get(job=job)
    assert (current.number, current.attempt, current.state) == (0, 2, RoundState.OPEN)
    assert reply.command == "train"
    assert reply.order is not None
    assert reply.order.data_start == before.data_start  # the work in hand is not lost
    assert not current.seats.filter(member=two.member).exists()
    assert two.poll(0, DEADLINE_MS).command == "wait"
    assert JobEvent.objects.filter(job=job, kind="restarted").count() == 1


def test_a_round_whose_members_are_all_lost_waits_and_begins_again_with_newcomers() -> None:
    job = make_job()
    (one,) = opened(job, 1)
    member_gone(one.member.pk, "its island is lost", at(10))
    sweep_rounds(at(20))
    (two,) = crew(job, 1)
    two.join(100)
    reply = two.poll(0, 200)
    assert reply.command == "train"
    assert reply.order is not None
    assert (reply.order.data_slot, reply.order.data_slots) == (0, 1)


def test_no_two_orders_read_the_same_data() -> None:
    job = make_job(tokens=10**6)
    trainers = opened(job, 3)
    advance_all(trainers, 0)
    advance_all(trainers, 1)
    ranges = []
    for round_ in Round.objects.filter(job=job):
        ranges += [(s.data_start, s.data_start + s.steps * STEP_TOKENS) for s in round_.seats.all()]
    ranges.sort()
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))
    job.refresh_from_db()
    assert job.data_cursor == ranges[-1][1]


def test_a_slower_member_does_fewer_steps_and_nobody_more_than_four_times_the_medians() -> None:
    job = make_job(tokens=10**6)
    trainers = crew(job, 3)
    for trainer, step_ms in zip(trainers, (10, 100, 200), strict=True):
        trainer.step_ms = step_ms
        trainer.poll(0)
    assert [seat(trainer, 0).steps for trainer in trainers] == [16, 4, 2]


def test_what_is_left_of_the_run_is_shared() -> None:
    job = make_job(tokens=5 * STEP_TOKENS)
    assert [seat(trainer, 0).steps for trainer in opened(job, 2)] == [3, 3]


def test_a_refused_submission_waits_for_the_next_round() -> None:
    job = make_job()
    one, two = opened(job, 2)
    refusal = one.submit(0, values=[float("nan")] * NUMEL)
    assert (refusal.accepted, refusal.reason) == (False, "not_finite")
    assert one.poll(0).command == "wait"
    two.submit(0)  # nothing more is expected of the first
    assert {each.member_id: each.reason for each in manifest(job, 0).refused} == {one.member.pk: "not_finite"}
    assert one.poll(0).command == "apply"
    assert one.poll(1).command == "train"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"job_id": "job_of_another"}, "header"),
        ({"member_id": "mem_of_another"}, "header"),
        ({"round": 7}, "header"),
        ({"codec": "bf16"}, "shape"),
        ({"layout_digest": "2" * 64}, "shape"),
        ({"data": b"junk"}, "header"),
        ({"values": [1.0, 2.0]}, "shape"),
        ({"values": [float("inf")] * NUMEL}, "not_finite"),
        ({"tokens": 5 * STEP_TOKENS}, "steps"),
    ],
)
def test_a_payload_is_judged_by_its_bytes(given: dict[str, object], reason: str) -> None:
    one, _two = opened(make_job(), 2)
    header = {k: v for k, v in given.items() if k not in {"data", "values", "tokens"}}
    rest = {k: v for k, v in given.items() if k in {"data", "values", "tokens"}}
    if header:
        from tests.marketplace.training.crew import payload

        rest["data"] = payload(one.job, one.member, 0, [1.0] * NUMEL, STEP_TOKENS, **header)
    reply = one.submit(0, **rest)  # type: ignore[arg-type]  # the cases above
    assert (reply.accepted, reply.reason) == (False, reason)


def test_more_tokens_than_its_steps_make_are_refused() -> None:
    one, _two = opened(make_job(), 2)
    assert one.submit(0, tokens=STEP_TOKENS).accepted


def test_the_norm_is_measured_and_never_the_one_claimed() -> None:
    one, _two = opened(make_job(), 2)
    one.submit(0, values=[3.0, 4.0, 0.0, 0.0])
    assert seat(one, 0).norm == 5.0


def test_bytes_that_never_arrived_do_not_count() -> None:
    one, _two = opened(make_job(), 2)
    request = coordinator.SubmitRequest(
        generation=1,
        instance="one",
        round=0,
        blob=coordinator.BlobRef(digest="f" * 64, size_bytes=10),
        tokens=1,
        steps=1,
        base_state_digest=state(0),
        train_loss_nats=1.0,
        norm=1.0,
        compute_ms=1,
    )
    assert coordinator.submit(one.token, request, at(0)).reason == "digest"


def test_a_submission_repeated_is_answered_alike_and_counted_once() -> None:
    job = make_job()
    one, two = opened(job, 2)
    from tests.marketplace.training.crew import payload

    data = payload(job, one.member, 0, [1.0, 2.0, 3.0, 4.0], STEP_TOKENS)
    assert one.submit(0, data=data).accepted
    assert one.submit(0, data=data).accepted
    assert one.submit(0, values=[9.0] * NUMEL).reason == "late"
    two.submit(0)
    assert one.submit(0, data=data).accepted
    assert manifest(job, 0).tokens == 2 * STEP_TOKENS


def test_a_submission_to_a_sealed_round_is_late() -> None:
    job = make_job()
    one, two = opened(job, 2)
    one.submit(0)
    one.poll(0, GRACE_MS + 1, phase="submitted")
    reply = two.submit(0, GRACE_MS + 2)
    assert (reply.accepted, reply.reason) == (False, "late")


def test_a_member_that_holds_another_state_than_most_takes_the_runs_anew_and_it_is_told_once() -> None:
    job = make_job()
    trainers = opened(job, 3)
    for trainer in trainers:
        trainer.submit(0)
    for trainer in trainers[:2]:
        trainer.applied(1)
    trainers[2].applied(1, digest=state(1, "b"))
    assert Round.objects.get(job=job, number=0).state_digest == state(1)
    assert trainers[2].poll(1, digest=state(1, "b")).command == "resync"
    assert trainers[2].poll(1, digest=state(1, "b")).command == "resync"
    assert trainers[1].poll(1).command == "train"
    assert JobEvent.objects.filter(job=job, kind="resync").count() == 1


def test_over_a_tie_nobody_is_sent_back_until_the_seal_decides() -> None:
    job = make_job()
    one, two = opened(job, 2)
    for trainer in (one, two):
        trainer.submit(0)
    one.applied(1)
    two.applied(1, digest=state(1, "b"))
    assert Round.objects.get(job=job, number=0).state_digest == ""
    assert one.poll(1).command == "train"
    assert two.poll(1, digest=state(1, "b")).command == "train"
    with pytest.raises(Conflict):
        two.snapshot(1, digest=state(1, "b"))
    one.submit(1)
    two.submit(1, base=state(1, "b"))
    assert {each.member_id: each.reason for each in manifest(job, 1).refused} == {two.member.pk: "base_state"}
    assert Round.objects.get(job=job, number=0).state_digest == state(1)
    assert two.poll(1, digest=state(1, "b")).command == "resync"


def test_a_snapshot_is_kept_only_if_it_is_the_state_most_hold() -> None:
    job = make_job()
    trainers = opened(job, 3)
    advance_all(trainers, 0)
    with pytest.raises(Conflict):
        trainers[0].snapshot(1, digest=state(1, "b"))
    with pytest.raises(InvalidInput, match="not sealed"):
        trainers[0].snapshot(2)
    trainers[0].snapshot(1)
    assert job.artifacts.get(kind="snapshot").round_number == 1


def test_the_first_figure_is_of_the_seeds_state_and_the_last_of_the_newest_measured() -> None:
    job = make_job()
    one, two = opened(job, 2)
    first = one if seat(one, 0).data_slot == 0 else two
    other = two if first is one else one
    other.applied(0, bits=1.0)  # not asked to
    first.applied(0, bits=8.0)
    first.applied(0, bits=7.0)  # again, after a restart
    for trainer in (one, two):
        trainer.submit(0)
    asked = one if one.member.pk in manifest(job, 0).evaluate else two
    unasked = two if asked is one else one
    asked.applied(1, bits=6.0)
    unasked.applied(1, bits=0.1)
    job.refresh_from_db()
    assert (job.bits_per_byte_first, job.bits_per_byte_last) == (8.0, 6.0)
    assert Round.objects.get(job=job, number=0).heldout_bits_per_byte == 6.0


def test_the_last_seal_finishes_the_job_and_its_members() -> None:
    job = make_job(tokens=2 * STEP_TOKENS)
    one, two = opened(job, 2)
    for trainer in (one, two):
        trainer.submit(0)
    job.refresh_from_db()
    assert job.state == JobState.FINISHING
    assert manifest(job, 0).evaluate == []
    assert not Round.objects.filter(job=job, state=RoundState.OPEN).exists()
    one.applied(1)
    assert one.poll(1).command == "finish"
    one.snapshot(1)
    one.applied(1, bits=3.0)
    assert one.poll(1, phase="final").command == "stop"
    job.refresh_from_db()
    assert job.bits_per_byte_last == 3.0


def test_a_member_asked_to_leave_brings_its_round_to_an_end_and_then_stops() -> None:
    job = make_job()
    one, two = opened(job, 2)
    drain_member(two.member.pk, "its lease ends", at(10))
    assert two.poll(0, 20).command == "train"
    two.submit(0, 30)
    assert two.poll(0, 40, phase="submitted").command == "stop"
    one.submit(0, 50)
    assert manifest(job, 0).tokens == 2 * STEP_TOKENS
    assert Round.objects.get(job=job, number=1).seats.get().member_id == one.member.pk


def test_one_that_leaves_is_not_waited_for_and_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(coordinator, "end_lease", lambda lease_id, **_: ended.append(lease_id))
    job = make_job()
    one, two = opened(job, 2)
    one.submit(0, 10)
    two.leave(20)
    assert manifest(job, 0).entries[0].member_id == one.member.pk
    assert ended == [two.member.lease_id]
    with pytest.raises(Gone):
        two.poll(0, 30)


def test_a_job_that_ended_stops_its_members() -> None:
    job = make_job()
    one, _two = opened(job, 2)
    Job.objects.filter(pk=job.pk).update(state=JobState.CANCELLED, reason="cancelled by its owner")
    reply = one.poll(0)
    assert (reply.command, reply.reason) == ("stop", "cancelled by its owner")


def test_a_reconnect_of_the_same_generation_fences_off_the_process_before() -> None:
    (one,) = opened(make_job(), 1)
    again = Trainer(one.member, instance="two")
    again.join()
    with pytest.raises(Conflict) as caught:
        one.poll(0)
    assert caught.value.code == "stale_generation"
    again.poll(0)


def test_a_new_generation_fences_off_the_old_token() -> None:
    (one,) = opened(make_job(), 1)
    assert next_generation(Member.objects.select_related("lease__island").get(pk=one.member.pk), "it failed", at(0))
    with pytest.raises(Conflict) as caught:
        one.submit(0)
    assert caught.value.code == "stale_generation"
    again = Trainer(one.row)
    again.join()
    assert again.poll(0).command == "train"  # the seat is the member's, not the process's


def test_a_token_that_is_not_ours_opens_nothing() -> None:
    (one,) = opened(make_job(), 1)
    forged = one.token[:-1] + ("a" if one.token[-1] != "a" else "b")
    with pytest.raises(Unauthorised):
        coordinator.join(forged, JoinRequest(generation=1, instance="x"), at(0))
    assert read_token(one.token) == (one.member.pk, 1)


def test_a_member_of_another_model_is_refused_by_name() -> None:
    one, two = crew(make_job(), 2)
    one.poll(0)
    request = PollRequest(
        generation=1, instance="one", state_round=0, parameters=NUMEL + 1, layout_digest="3" * 64, state_digest=state(0)
    )
    with pytest.raises(InvalidInput) as caught:
        coordinator.poll(two.token, request, at(0))
    assert caught.value.fields[0].field == "layout_digest"


def test_a_poll_that_changes_nothing_locks_no_job_and_costs_few_queries() -> None:
    one, *_ = opened(make_job(), 3)
    with CaptureQueriesContext(
        connection,
    ) as captured:
        assert one.poll(0, 100, phase="training").command == "train"
    assert len(captured) <= 6
    assert not any("FOR NO KEY UPDATE" in query["sql"] for query in captured)


def test_the_same_standing_gives_the_same_answer_whoever_asks_again() -> None:
    one, *_ = opened(make_job(), 2)
    assert msgspec.json.encode(one.poll(0, 100)) == msgspec.json.encode(one.poll(0, 100))


def test_what_happened_is_told_in_sentences() -> None:
    job = make_job()
    one, two = opened(job, 2)
    one.submit(0)
    two.submit(0, values=[float("nan")] * NUMEL)
    told = list(JobEvent.objects.filter(job=job).order_by("pk").values_list("kind", "message"))
    names = [trainer.member.lease.island.name for trainer in (one, two)]
    assert ("joined", f"{names[0]} joined at the start, training on cpu") in told
    assert told[-1] == ("sealed", f"Round 0 sealed with {names[0]}: 128 tokens; left out: {names[1]} (not_finite)")


def test_a_round_that_counts_ends_a_row_of_failures() -> None:
    job = make_job()
    one, two = opened(job, 2)
    Member.objects.filter(pk=one.member.pk).update(restarts=3)
    one.submit(0)
    two.submit(0)
    assert one.row.restarts == 0
    assert one.row.tokens_per_s == STEP_TOKENS
    assert one.row.state == MemberState.ACTIVE
    assert make_lease(job).job_ref == job.pk
