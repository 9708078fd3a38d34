"""The money pages, as a person meets them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role, User
from marketplace.billing.gateway import NETWORK_RETRIES
from marketplace.billing.models import TopUp
from marketplace.billing.services.holds import cash, deposit, hold, release
from marketplace.billing.services.topups import settle_top_up
from marketplace.core.clock import database_now
from tests.fakes.stripe import FakeStripe

pytestmark = pytest.mark.django_db


@pytest.fixture
def page(client: Client, ada: User) -> Client:
    client.force_login(ada)
    return client


def test_an_empty_page_says_what_to_do(page: Client) -> None:
    shown = page.get("/money").content.decode()
    assert "To begin, top up above" in shown
    assert "Go to payment" in shown


def test_paying_in_leads_to_the_payment_page_and_back_to_one_that_waits(
    page: Client, stripe: FakeStripe, pay: Callable[..., str]
) -> None:
    answer = page.post("/money/top-ups", {"amount": "25"})
    top_up = TopUp.objects.get()
    assert (answer.status_code, answer["Location"]) == (303, top_up.pay_url)
    back = pay(top_up.pay_url).removeprefix("http://127.0.0.1:8000")
    waiting = page.get(back).content.decode()
    assert "has not confirmed the payment yet" in waiting
    assert 'hx-trigger="every 2s"' in waiting
    settle_top_up(top_up.pk, database_now())
    done = page.get(back, headers={"HX-Request": "true"}).content.decode()
    assert "You have" in done
    assert "hx-trigger" not in done
    assert "<html" not in done
    assert "$25.00" in page.get("/money").content.decode()


def test_a_provider_that_is_away_is_said_and_waited_for(page: Client, stripe: FakeStripe) -> None:
    stripe.fail_next(*["500"] * (1 + NETWORK_RETRIES))
    answer = page.post("/money/top-ups", {"amount": "25"}, follow=True)
    shown = answer.content.decode()
    assert "does not answer just now. Nothing was charged." in shown
    assert 'hx-trigger="every 2s"' in shown


@pytest.mark.parametrize("amount", ["", "much", "1", "10.001", "60000"])
def test_a_refused_amount_comes_back_as_it_was_typed(page: Client, stripe: FakeStripe, amount: str) -> None:
    answer = page.post("/money/top-ups", {"amount": amount})
    shown = answer.content.decode()
    assert answer.status_code == 422
    assert "Nothing was charged:" in shown
    assert f'value="{amount}"' in shown
    assert stripe.requests == []


def test_who_may_not_pay_is_offered_no_form_and_refused(page: Client, ada: User, stripe: FakeStripe) -> None:
    ada.memberships.update(role=Role.MEMBER)
    assert "Go to payment" not in page.get("/money").content.decode()
    assert page.post("/money/top-ups", {"amount": "25"}).status_code == 403
    assert TopUp.objects.count() == 0


def test_the_page_and_the_file_show_the_same_lines_and_add_up(page: Client, buyer: Actor) -> None:
    deposit(buyer.organisation, 25_000_000, "pi_1")
    held = hold("job_1", buyer.organisation, 5_123_456)
    release(held, cash(buyer.organisation))
    hold("job_2", buyer.organisation, 123_456)
    shown: Any = page.get("/money")
    context = shown.context
    assert [(ref, amount) for _, _, ref, amount in context["held"]] == [("job_2", 123_456)]
    for position, (_, closing) in enumerate(context["closing"]):
        moved = sum(row["cells"][position][1] for day in context["days"] for row in day["rows"])
        assert context["opening"][position][1] + moved == closing
    assert context["digits"] == 6, "with fewer digits the page would not add up"
    assert "-$5.123456" in shown.content.decode()

    rows = list(csv.DictReader(io.StringIO(page.get("/money/statement.csv").content.decode())))
    assert [row["what"] for row in rows] == ["Opening", "Top-up", "Hold", "Release", "Hold", "Closing"]
    for name in ("cash_usd", "held_usd"):
        assert sum(Decimal(row[name]) for row in rows[:-1]) == Decimal(rows[-1][name])


def test_a_period_that_cannot_be_is_said_on_the_page(page: Client) -> None:
    shown = page.get("/money?since=2026-02-01&until=2026-01-01").content.decode()
    assert "The last 30 days are shown: must be after its beginning." in shown
    for query in ("since=nonsense", "since=0001-01-01", "until=9999-12-31", "since=9999-12-31", "until=0001-01-01"):
        assert page.get(f"/money?{query}").status_code == 200, query


def test_another_organisations_top_up_has_no_page(page: Client) -> None:
    assert page.get("/money/top-ups/top_other").status_code == 404


def test_a_form_without_its_token_is_refused(ada: User) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(ada)
    assert strict.post("/money/top-ups", {"amount": "25"}).status_code == 403
