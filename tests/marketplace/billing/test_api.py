"""Money over REST, as a program uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Organisation
from marketplace.billing.gateway import NETWORK_RETRIES
from marketplace.billing.models import TopUp
from marketplace.billing.services.holds import deposit, hold
from marketplace.billing.services.topups import reconcile_top_ups, start_top_up
from marketplace.billing.tasks import drain_inbox
from marketplace.core.clock import database_now
from tests.fakes.stripe import FakeStripe

pytestmark = pytest.mark.django_db

Api = Callable[..., Any]
BODY = {"amount_uusd": 25_000_000}
TOP_UPS = "/api/v1/top-ups"


def test_a_top_up_is_asked_for_paid_and_seen(api: Api, stripe: FakeStripe, pay: Api, deliver: Api) -> None:
    answer = api("POST", TOP_UPS, BODY, key="1")
    assert answer.status_code == 201
    body = answer.json()
    assert (body["state"], body["amount_uusd"]) == ("pending", 25_000_000)
    assert answer["Location"] == f"{TOP_UPS}/{body['id']}"
    pay(body["pay_url"])
    deliver()
    assert reconcile_top_ups(database_now()) == 0
    drain_inbox()
    seen = api("GET", f"{TOP_UPS}/{body['id']}").json()
    assert (seen["state"], seen["pay_url"], seen["settled_at"] is None) == ("paid", None, False)
    assert api("GET", "/api/v1/balance").json() == {
        "cash_uusd": 25_000_000,
        "held_uusd": 0,
        "earned_uusd": 0,
        "payable_uusd": 0,
        "reserve_uusd": 0,
    }


def test_the_same_key_is_the_same_top_up_also_when_the_answer_was_lost(api: Api, stripe: FakeStripe) -> None:
    stripe.fail_next(*["drop"] * (1 + NETWORK_RETRIES))
    first = api("POST", TOP_UPS, BODY, key="1")
    assert (first.status_code, first.json()["state"], first.json()["pay_url"]) == (201, "created", None)
    second = api("POST", TOP_UPS, BODY, key="1")
    assert second.headers["Idempotency-Replayed"] == "true"
    assert (second.json()["id"], second.json()["state"]) == (first.json()["id"], "pending")
    assert second.json()["pay_url"]
    assert len(stripe.sessions) == TopUp.objects.count() == 1
    other = api("POST", TOP_UPS, {"amount_uusd": 30_000_000}, key="1")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "amount_uusd"),
        ({"amount_uusd": "much"}, "amount_uusd"),
        ({"amount_uusd": 4_990_000}, "amount_uusd"),
        ({"amount_uusd": 10**11}, "amount_uusd"),
        ({"amount_uusd": 25_000_001}, "amount_uusd"),
    ],
)
def test_a_refusal_names_the_field(api: Api, stripe: FakeStripe, body: dict[str, Any], field: str) -> None:
    answer = api("POST", TOP_UPS, body, key="1")
    assert (answer.status_code, [each["field"] for each in answer.json()["fields"]]) == (422, [field])
    assert stripe.requests == []


def test_another_organisations_top_up_is_not_found(api: Api) -> None:
    other = Actor(Organisation.objects.create(name="other"), "owner", "user:0")
    theirs = start_top_up(other, amount_uusd=25_000_000, now=database_now())
    assert api("GET", f"{TOP_UPS}/{theirs.pk}").status_code == 404
    assert Client().get("/api/v1/balance").status_code == 401


def test_a_statement_adds_up_over_rest(api: Api, buyer: Actor) -> None:
    deposit(buyer.organisation, 25_000_000, "pi_1")
    hold("job_1", buyer.organisation, 5_000_000)
    found = api("GET", "/api/v1/statement").json()
    for name in found["opening"]:
        total = found["opening"][name] + sum(line["moved"][name] for line in found["lines"])
        assert total == found["closing"][name]
    assert [(line["what"], line["ref"]) for line in found["lines"]] == [("Top-up", "pi_1"), ("Hold", "job_1")]
    assert found["closing"] == api("GET", "/api/v1/balance").json()


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("since=yesterday", "since"),
        ("since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", "until"),
        ("since=2020-01-01T00:00:00Z&until=2026-01-01T00:00:00Z", "since"),
        ("since=0081-01-01T00:00:00Z&until=2026-01-01T00:00:00Z", "since"),
        ("until=0081-01-18T06:54:43Z", "until"),
        ("until=0001-01-01T00:00:00Z", "until"),
    ],
)
def test_a_period_that_cannot_be_is_refused_by_its_field(api: Api, query: str, field: str) -> None:
    answer = api("GET", f"/api/v1/statement?{query}")
    assert (answer.status_code, [each["field"] for each in answer.json()["fields"]]) == (422, [field])
