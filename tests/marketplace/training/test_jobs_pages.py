"""The pages of jobs: the list, the form with its call beside it, and a job as it moves."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.services.holds import cash
from marketplace.training.models import Job, JobState
from tests.marketplace.training.crew import advance_all, make_job, opened
from tests.marketplace.training.people import USD, customer, signed_in

pytestmark = pytest.mark.django_db

TYPED = {
    "name": "first run",
    "n_layer": "2",
    "n_head": "4",
    "d_model": "64",
    "context": "64",
    "tokens": "1,500,000",
    "batch_tokens": "1024",
    "budget_usd": "20",
    "deadline": "",
    "min_islands": "1",
    "max_islands": "4",
    "gpus": "",
    "min_vram_gib": "",
    "codec": "int4",
    "inner_steps": "",
}


@pytest.fixture
def ada(db: None) -> Actor:
    return customer()


@pytest.fixture
def page(ada: Actor, client: Client) -> Client:
    return signed_in(ada, client)


def typed(page: Client, **more: str) -> dict[str, str]:
    """What a form that was shown sends."""
    shown = page.get("/jobs/new").content.decode()
    ticket = re.search(r'name="ticket" value="([^"]+)"', shown)
    assert ticket is not None
    return {**TYPED, "ticket": ticket[1], **more}


def training(ada: Actor, rounds: int = 2) -> Job:
    job = make_job()
    Job.objects.filter(pk=job.pk).update(organisation=ada.organisation)
    trainers = opened(job, 2)
    for number in range(rounds):
        advance_all(trainers, number, 1_000 * (number + 1))
    return Job.objects.get(pk=job.pk)


def test_with_no_job_the_page_says_what_one_is_and_where_to_begin(page: Client) -> None:
    shown = page.get("/jobs").content.decode()
    assert "No job yet" in shown
    assert "/jobs/new" in shown


def test_a_job_is_submitted_by_its_form(page: Client, ada: Actor) -> None:
    answer = page.post("/jobs/new", typed(page), follow=True)
    job = Job.objects.get()
    assert answer.redirect_chain == [(f"/jobs/{job.pk}", 302)]
    assert (job.tokens_target, job.budget_uusd, job.created_by) == (1_500_000, 20 * USD, ada.name)
    assert "its budget is held" in answer.content.decode()
    assert "first run" in page.get("/jobs").content.decode()


def test_a_form_sent_twice_is_one_job(page: Client, ada: Actor) -> None:
    form = typed(page)
    first, again = page.post("/jobs/new", form), page.post("/jobs/new", form)
    assert first["Location"] == again["Location"]
    assert Job.objects.count() == 1
    assert balance_uusd(cash(ada.organisation)) == 80 * USD


def test_the_ticket_of_another_organisations_job_leads_nowhere(page: Client, ada: Actor) -> None:
    form = typed(page)
    page.post("/jobs/new", form)
    stranger = signed_in(customer(), Client())
    assert stranger.post("/jobs/new", form).status_code == 409
    assert Job.objects.count() == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("budget_usd", "a lot", "dollar"),
        ("budget_usd", "0.001", "10000"),
        ("tokens", "-5", "whole number"),
        ("n_head", "3", "multiple of twice n_head"),
        ("max_islands", "0", "greater than or equal to 1"),
        ("deadline", "yesterday", "date and time"),
        ("deadline", "2020-01-01T00:00", "future"),
        ("gpus", "h900", "h900"),
        ("name", "", "blank"),
    ],
)
def test_a_refused_form_keeps_what_was_typed_and_marks_the_field(
    page: Client, ada: Actor, name: str, value: str, words: str
) -> None:
    answer = page.post("/jobs/new", typed(page, **{name: value}))
    shown = answer.content.decode()
    assert answer.status_code == 422
    marked = re.search(
        r'<div class="field wrong">\s*<label for="job-(\w+)".*?<p class="problem"[^>]*>([^<]*)', shown, re.S
    )
    assert marked is not None
    assert marked[1] in (name, "d_model")
    assert words in marked[2]
    assert value == "" or f'value="{value}"' in shown
    assert not Job.objects.exists()
    assert balance_uusd(cash(ada.organisation)) == 100 * USD


def test_what_cannot_be_paid_is_refused_with_a_way_to_top_up(page: Client) -> None:
    answer = page.post("/jobs/new", typed(page, budget_usd="500"))
    assert answer.status_code == 402
    assert "Top up" in answer.content.decode()


def test_the_call_beside_the_form_is_the_one_it_makes(page: Client) -> None:
    shown = page.post("/jobs/preview", typed(page, inner_steps="30", codec="int8")).content.decode()
    body = re.search(r"-d &#x27;(.*?)&#x27;", shown, re.S)
    assert body is not None
    spec = json.loads(body[1].replace("&quot;", '"'))
    assert (spec["tokens"], spec["sync"]) == (1_500_000, {"inner_steps": 30, "codec": "int8"})
    assert "115 k parameters" in shown
    assert not Job.objects.exists()


def test_a_jobs_page_shows_its_rounds_its_islands_and_its_money(page: Client, ada: Actor) -> None:
    job = training(ada)
    shown = page.get(f"/jobs/{job.pk}").content.decode()
    assert shown.count("lane-line") == 2
    assert "lane-train" in shown
    assert "same on 2" in shown
    assert "Cost against budget" in shown
    assert 'hx-trigger="every 2s"' in shown
    live = page.get(f"/jobs/{job.pk}/live").content.decode()
    assert "<html" not in live
    assert 'id="standing" hx-swap-oob="true"' in live


def test_an_ended_job_is_not_asked_for_again(page: Client, ada: Actor) -> None:
    job = training(ada)
    Job.objects.update(state=JobState.SUCCEEDED, ended_at=job.created_at, settled_at=job.created_at)
    assert "hx-get" not in page.get(f"/jobs/{job.pk}/live").content.decode()


def test_the_curve_has_a_point_a_round_against_tokens_dollars_and_time(page: Client, ada: Actor) -> None:
    job = training(ada, rounds=3)
    curve: dict[str, Any] = page.get(f"/jobs/{job.pk}/curve.json").json()
    assert [axis["key"] for axis in curve["axes"]] == ["tokens", "uusd", "ms"]
    series = {each["name"]: each["points"] for each in curve["series"]}
    assert [point["tokens"] for point in series["training"]] == [256, 512, 768]
    assert series["training"][0]["y"] == pytest.approx(2.0 / 0.6931471805599453)
    assert curve["live"] is True


def test_a_job_is_cancelled_by_its_button(page: Client) -> None:
    page.post("/jobs/new", typed(page))
    job = Job.objects.get()
    answer = page.post(f"/jobs/{job.pk}/cancel", follow=True)
    assert "The job is cancelled" in answer.content.decode()
    assert "Cancel the job" not in answer.content.decode()
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED


@pytest.mark.parametrize("path", ["", "/live", "/curve.json", "/cancel", "/checkpoints/art_x"])
def test_another_organisations_job_is_not_there(page: Client, path: str) -> None:
    theirs = training(customer())
    call = page.post if path == "/cancel" else page.get
    answer = call(f"/jobs/{theirs.pk}{path}", follow=True)
    assert answer.status_code == 404
    theirs.refresh_from_db()
    assert theirs.state == JobState.RUNNING


def test_who_may_only_look_can_submit_and_cancel_nothing(page: Client, ada: Actor) -> None:
    job = training(ada)
    form = typed(page)
    ada.organisation.memberships.update(role=Role.VIEWER)
    assert "Cancel the job" not in page.get(f"/jobs/{job.pk}").content.decode()
    page.post(f"/jobs/{job.pk}/cancel")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    assert page.post("/jobs/new", form).status_code == 403
    assert Job.objects.count() == 1


def test_nobody_in_particular_is_asked_to_sign_in(client: Client) -> None:
    for path in ("/jobs", "/jobs/new", "/jobs/job_x"):
        assert client.get(path)["Location"].startswith("/accounts/login/")


def test_a_long_list_costs_no_more_queries(page: Client, ada: Actor, django_assert_max_num_queries: Any) -> None:
    for _ in range(6):
        training(ada, rounds=1)
    with django_assert_max_num_queries(11):
        page.get("/jobs")
