"""Every billing test that touches the database ends with the audit; and a payment provider for those that pay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from django.test import Client
from pytest_django import Settings

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Role, User
from marketplace.accounts.services import ensure_organisation, issue_key
from marketplace.billing.invariants import breaches
from marketplace.core.clock import database_now
from tests.fakes.stripe import FakeStripe


@pytest.fixture(autouse=True)
def ledger_is_audited(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("django_db")
    if mark is None:
        yield
        return
    request.getfixturevalue("transactional_db" if mark.kwargs.get("transaction") else "db")
    yield
    assert breaches() == []


@pytest.fixture
def stripe(settings: Settings) -> Iterator[FakeStripe]:
    """The provider's stand-in, over HTTP. Its messages stay with it until a test delivers them."""
    with FakeStripe() as fake:
        settings.STRIPE_API_BASE = fake.url
        settings.STRIPE_SECRET_KEY = fake.key
        settings.STRIPE_WEBHOOK_SECRETS = ["whsec_next", fake.secret]
        yield fake


@pytest.fixture
def ada(db: None) -> User:
    user = User.objects.create_user("ada@example.org", "correct horse battery")
    ensure_organisation(user)
    return user


@pytest.fixture
def buyer(ada: User) -> Actor:
    return Actor.of_membership(ada.memberships.get())


@pytest.fixture
def api(buyer: Actor) -> Callable[..., Any]:
    """A program of the buyer's: api("POST", "/api/v1/top-ups", {...}, key="1")."""
    secret = issue_key(buyer, name="test", role=Role.OWNER, now=database_now()).secret
    client = Client(headers={"Authorization": f"Bearer {secret}"})

    def ask(method: str, path: str, body: Any = None, key: str = "") -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        return client.generic(method, path, json.dumps(body), content_type="application/json", headers=headers)

    return ask


@pytest.fixture
def pay() -> Callable[..., str]:
    """Press a button of the payment page; the address it leads to."""

    def press(pay_url: str, button: str = "pay") -> str:
        answer = httpx.post(pay_url, data={"button": button})
        assert answer.status_code == 303
        return answer.headers["Location"]

    return press


@pytest.fixture
def deliver(client: Client, stripe: FakeStripe) -> Callable[..., int]:
    """Hand the provider's messages of one kind to the webhook; the last status."""

    def send(kind: str = "", signature: str | None = None) -> int:
        status = 0
        for event in list(stripe.events.values()):
            if event["type"].startswith(kind):
                payload = json.dumps(event)
                header = stripe.sign(payload) if signature is None else signature
                answer = client.post(
                    "/billing/stripe/webhook",
                    payload,
                    content_type="application/json",
                    headers={"Stripe-Signature": header},
                )
                status = answer.status_code
        return status

    return send
