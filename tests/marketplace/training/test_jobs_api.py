"""Jobs over REST: submitted once, shown to their own, followed by events and metrics, cancelled, and their bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.models import Role
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.services.holds import cash
from marketplace.training.models import Artifact, ArtifactKind, Job, JobState
from tests.marketplace.training.crew import advance_all, make_job, opened
from tests.marketplace.training.people import USD, Caller, asked, customer, fields_of

pytestmark = pytest.mark.django_db

DATA = b"text to train on"
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def buyer(db: None) -> Caller:
    return Caller(customer())


def announce(caller: Caller, data: bytes = DATA, kind: str = "dataset", **more: Any) -> Any:
    body = {"kind": kind, "name": "my text", "digest": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    return caller.post("artifacts", {**body, **more})


def send(announced: Any, data: bytes = DATA) -> Any:
    upload = announced.json()["upload"]
    path = upload["url"].removeprefix("http://testserver")
    return Client().put(path, data, content_type="application/octet-stream")


def mine(caller: Caller, **terms: Any) -> Job:
    """A job of the caller's that trains, made by hand."""
    job = make_job(**terms)
    Job.objects.filter(pk=job.pk).update(organisation=caller.actor.organisation)
    return Job.objects.get(pk=job.pk)


def test_a_job_is_submitted_and_its_whole_budget_is_held(buyer: Caller) -> None:
    made = buyer.post("jobs", asked())
    assert made.status_code == 201
    body = made.json()
    assert made["Location"] == f"/api/v1/jobs/{body['id']}"
    assert (body["state"], body["budget_uusd"], body["free_uusd"], body["spent_uusd"]) == (
        "queued",
        20 * USD,
        20 * USD,
        0,
    )
    assert (body["spec"]["sync"], body["members"], body["bits_per_byte_last"]) == ("auto", [], None)
    assert buyer.get(f"jobs/{body['id']}").json() == body
    assert balance_uusd(cash(buyer.actor.organisation)) == 80 * USD


def test_the_same_key_is_the_same_job_and_its_money_is_held_once(buyer: Caller) -> None:
    first, again = (buyer.post("jobs", asked(), key="mine") for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    assert again["Idempotency-Replayed"] == "true"
    other = buyer.post("jobs", asked(tokens=2_000_000), key="mine")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    missing = buyer.client.post("/api/v1/jobs", asked(), content_type="application/json")
    assert (missing.status_code, missing.json()["code"]) == (422, "idempotency_key_missing")
    assert Job.objects.count() == 1
    assert balance_uusd(cash(buyer.actor.organisation)) == 80 * USD


def test_a_refused_job_holds_nothing_and_names_its_fields(buyer: Caller) -> None:
    odd = buyer.post("jobs", asked(tokens=0, model={"kind": "gpt", "n_layer": -1}))
    assert (odd.status_code, odd.json()["code"]) == (422, "invalid")
    assert set(fields_of(odd)) == {"tokens", "model.n_layer"}
    assert fields_of(buyer.post("jobs", asked(gpus={"allowed": ["h100-sxm-80g", "h900"]}))) == [
        "gpus.allowed.0",
        "gpus.allowed.1",
    ]
    unknown = asked(data={"kind": "artifact", "artifact_id": "art_nowhere"})
    assert fields_of(buyer.post("jobs", unknown)) == ["data.artifact_id"]
    assert not Job.objects.exists()
    assert balance_uusd(cash(buyer.actor.organisation)) == 100 * USD


def test_a_job_that_cannot_be_paid_is_refused_with_what_is_missing(buyer: Caller) -> None:
    dear = buyer.post("jobs", asked(budget_uusd=101 * USD))
    assert (dear.status_code, dear.json()["code"]) == (402, "insufficient_funds")
    assert not Job.objects.exists()


@pytest.mark.parametrize("body", ["[]", '"job"', "{", "null", '{"name": "\\u0000"}'])
def test_what_is_no_job_at_all_is_refused_as_such(buyer: Caller, body: str) -> None:
    answer = buyer.client.post("/api/v1/jobs", body, content_type="application/json", headers={"Idempotency-Key": "k"})
    assert answer.status_code in (400, 422)
    assert answer.json()["code"]


def test_jobs_are_listed_newest_first_in_pages_and_by_state(buyer: Caller) -> None:
    ids = [buyer.post("jobs", asked(budget_uusd=USD)).json()["id"] for _ in range(3)]
    buyer.post(f"jobs/{ids[0]}/cancel")
    page = buyer.get("jobs", limit=2).json()
    assert [each["id"] for each in page["results"]] == [ids[2], ids[1]]
    assert page["count"] == 3
    assert [each["id"] for each in buyer.get("jobs", state="cancelled").json()["results"]] == [ids[0]]
    assert fields_of(buyer.get("jobs", state="asleep")) == ["state"]


def test_cancelling_is_done_once_and_an_ended_job_stays_as_it_ended(buyer: Caller) -> None:
    job = buyer.post("jobs", asked()).json()["id"]
    assert buyer.post(f"jobs/{job}/cancel").json()["state"] == "cancelled"
    assert buyer.post(f"jobs/{job}/cancel").status_code == 200
    Job.objects.update(state=JobState.SUCCEEDED)
    late = buyer.post(f"jobs/{job}/cancel")
    assert (late.status_code, late.json()["code"]) == (409, "job_ended")


def test_events_are_read_on_from_the_last_that_was_seen(buyer: Caller) -> None:
    job = buyer.post("jobs", asked()).json()["id"]
    first = buyer.get(f"jobs/{job}/events").json()
    assert [each["kind"] for each in first["results"]] == ["submitted"]
    buyer.post(f"jobs/{job}/cancel")
    then = buyer.get(f"jobs/{job}/events", after=first["last_seq"]).json()
    assert [each["kind"] for each in then["results"]] == ["ended"]
    nothing = buyer.get(f"jobs/{job}/events", after=then["last_seq"]).json()
    assert nothing == {"results": [], "last_seq": then["last_seq"]}
    assert fields_of(buyer.get(f"jobs/{job}/events", after=-1)) == ["after"]


def test_metrics_tell_each_round_who_took_part_and_the_open_one(buyer: Caller) -> None:
    job = mine(buyer)
    trainers = opened(job, 2)
    advance_all(trainers, 0, 1_000)
    advance_all(trainers, 1, 2_000)
    metrics = buyer.get(f"jobs/{job.pk}/metrics").json()
    assert [each["number"] for each in metrics["rounds"]] == [0, 1]
    assert metrics["open_round"]["number"] == 2
    first = metrics["rounds"][0]
    assert first["tokens"] == first["tokens_after"] == 256
    assert [seat["accepted"] for seat in first["seats"]] == [True, True]
    assert {seat["state_digest"] for seat in first["seats"]} == {first["state_digest"]}
    later = buyer.get(f"jobs/{job.pk}/metrics", after_round=0).json()["rounds"]
    assert [each["number"] for each in later] == [1]
    assert len(buyer.get(f"jobs/{job.pk}/metrics", limit=1).json()["rounds"]) == 1


def test_a_checkpoint_is_fetched_by_a_signed_address_by_whoever_has_it(buyer: Caller) -> None:
    job = mine(buyer)
    trainers = opened(job, 1)
    advance_all(trainers, 0, 1_000)
    trainers[0].snapshot(1, 1_500, data=b"a checkpoint")
    (kept,) = buyer.get(f"jobs/{job.pk}/artifacts").json()["results"]
    assert (kept["kind"], kept["round_number"], kept["stored"]) == ("snapshot", 1, True)
    path = kept["url"].removeprefix("http://testserver")
    answer = Client().get(path)
    assert b"".join(answer.streaming_content) == b"a checkpoint"  # type: ignore[attr-defined]
    assert hashlib.sha256(b"a checkpoint").hexdigest() == kept["digest"]
    assert answer["Content-Disposition"] == f'attachment; filename="{job.pk}-round-1.safetensors"'
    assert Client().get(path[:-2] + "xx").status_code == 403


def test_bytes_are_announced_sent_and_named_by_a_job(buyer: Caller) -> None:
    announced = announce(buyer)
    assert announced.json()["stored"] is False
    early = buyer.post("jobs", asked(data={"kind": "artifact", "artifact_id": announced.json()["id"]}))
    assert fields_of(early) == ["data.artifact_id"]
    assert send(announced).status_code == 201
    again = announce(buyer).json()
    assert (again["id"], again["stored"], again["upload"]) == (announced.json()["id"], True, None)
    job = buyer.post("jobs", asked(data={"kind": "artifact", "artifact_id": announced.json()["id"]}))
    assert job.status_code == 201
    assert Job.objects.get().run["data"]["digest"] == DIGEST
    assert [each["id"] for each in buyer.get("artifacts").json()["results"]] == [again["id"]]


def test_other_bytes_than_announced_are_not_taken(buyer: Caller) -> None:
    announced = announce(buyer)
    assert send(announced, b"text to train 0n").status_code == 422
    assert send(announced, DATA + b"!").status_code == 413
    assert buyer.get(f"artifacts/{announced.json()['id']}").json()["stored"] is False


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"digest": "short"}, "digest"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"kind": "snapshot"}, "kind"),
        ({"name": ""}, "name"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_an_announcement_that_is_wrong_names_its_field(buyer: Caller, more: dict[str, Any], field: str) -> None:
    assert fields_of(announce(buyer, **more)) == [field]
    assert not Artifact.objects.exists()


def test_another_organisations_jobs_and_bytes_are_not_there(buyer: Caller) -> None:
    stranger = Caller(customer())
    job = buyer.post("jobs", asked()).json()["id"]
    announced = announce(buyer)
    send(announced)
    for path in ("", "/events", "/metrics", "/artifacts"):
        assert stranger.get(f"jobs/{job}{path}").status_code == 404
    assert stranger.post(f"jobs/{job}/cancel").status_code == 404
    assert stranger.get(f"artifacts/{announced.json()['id']}").status_code == 404
    assert stranger.get("jobs").json()["count"] == stranger.get("artifacts").json()["count"] == 0
    theirs = asked(data={"kind": "artifact", "artifact_id": announced.json()["id"]})
    assert fields_of(stranger.post("jobs", theirs)) == ["data.artifact_id"]
    assert Job.objects.get().state == JobState.QUEUED


def test_a_key_that_may_only_look_submits_cancels_and_uploads_nothing(buyer: Caller) -> None:
    job = buyer.post("jobs", asked()).json()["id"]
    viewer = Caller(buyer.actor, Role.VIEWER)
    assert viewer.get(f"jobs/{job}").status_code == 200
    assert viewer.post("jobs", asked()).status_code == 403
    assert viewer.post(f"jobs/{job}/cancel").status_code == 403
    assert announce(viewer).status_code == 403
    assert Client().get("/api/v1/jobs").status_code == 401


def test_a_payload_of_the_run_is_no_artifact_for_the_customer(buyer: Caller) -> None:
    job = mine(buyer)
    advance_all(opened(job, 1), 0)
    assert Artifact.objects.filter(job=job, kind=ArtifactKind.PAYLOAD).exists()
    assert buyer.get(f"jobs/{job.pk}/artifacts").json()["count"] == 0
