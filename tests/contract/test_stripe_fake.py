"""The stand-in for Stripe against Stripe's own library: what it must keep of the real wire."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
import stripe

from tests.fakes.stripe import FakeStripe
from tests.servers import wait_until

ORDER: Any = {
    "mode": "payment",
    "line_items": [
        {"quantity": 1, "price_data": {"currency": "usd", "unit_amount": 2_500, "product_data": {"name": "Balance"}}}
    ],
    "client_reference_id": "top_1",
    "payment_intent_data": {"metadata": {"top_up": "top_1"}},
    "success_url": "http://127.0.0.1/done?session={CHECKOUT_SESSION_ID}",
    "cancel_url": "http://127.0.0.1/back",
}


@pytest.fixture
def fake() -> Iterator[FakeStripe]:
    with FakeStripe() as running:
        yield running


def library(fake: FakeStripe, key: str = "sk_test_embedded") -> Any:
    return stripe.StripeClient(key, base_addresses={"api": fake.url}, max_network_retries=0).v1


def test_a_payment_from_session_to_balance(fake: FakeStripe) -> None:
    v1 = library(fake)
    session = v1.checkout.sessions.create(ORDER)
    assert (session.status, session.payment_status, session.amount_total) == ("open", "unpaid", 2_500)
    answer = httpx.post(session.url, data={"button": "pay"})
    assert answer.headers["Location"] == f"http://127.0.0.1/done?session={session.id}"
    session = v1.checkout.sessions.retrieve(session.id)
    intent = v1.payment_intents.retrieve(session.payment_intent)
    assert (session.status, session.payment_status, session.url) == ("complete", "paid", None)
    assert (intent.status, intent.amount_received, intent.metadata["top_up"]) == ("succeeded", 2_500, "top_1")
    (moved,) = v1.balance_transactions.list().data
    assert (moved.source, moved.net) == (intent.latest_charge, 2_500 - moved.fee)
    assert {event.type for event in v1.events.list().data} == {
        "payment_intent.succeeded",
        "checkout.session.completed",
    }
    again = httpx.post(f"{fake.url}/c/pay/{session.id}", data={"button": "pay"})
    assert "This payment is done." in again.text
    assert len(fake.balance) == 1


def test_a_declined_card_leaves_the_session_open(fake: FakeStripe) -> None:
    v1 = library(fake)
    session = v1.checkout.sessions.create(ORDER)
    assert httpx.post(session.url, data={"button": "decline"}).headers["Location"] == "http://127.0.0.1/back"
    session = v1.checkout.sessions.retrieve(session.id)
    intent = v1.payment_intents.retrieve(session.payment_intent)
    assert (session.status, intent.status) == ("open", "requires_payment_method")
    assert intent.last_payment_error.code == "card_declined"


def test_an_idempotency_key_has_one_answer_and_one_set_of_parameters(fake: FakeStripe) -> None:
    v1 = library(fake)
    first = v1.checkout.sessions.create(ORDER, {"idempotency_key": "k"})
    again = v1.checkout.sessions.create(ORDER, {"idempotency_key": "k"})
    assert (first.id, len(fake.sessions)) == (again.id, 1)
    assert again.last_response.headers["Idempotent-Replayed"] == "true"
    with pytest.raises(stripe.IdempotencyError):
        v1.checkout.sessions.create({**ORDER, "client_reference_id": "top_2"}, {"idempotency_key": "k"})


def test_its_refusals_are_those_of_the_library(fake: FakeStripe) -> None:
    v1 = library(fake)
    with pytest.raises(stripe.AuthenticationError):
        library(fake, "sk_test_wrong").checkout.sessions.create(ORDER)
    with pytest.raises(stripe.InvalidRequestError) as missing:
        v1.checkout.sessions.retrieve("cs_none")
    assert missing.value.code == "resource_missing"
    for fault, error in (("429", stripe.RateLimitError), ("500", stripe.APIError), ("drop", stripe.APIConnectionError)):
        fake.fail_next(fault)
        with pytest.raises(error):
            v1.checkout.sessions.create(ORDER)
    assert len(fake.sessions) == 1, "a dropped answer was work done, the others were none"


def test_messages_are_signed_and_sent_again_until_they_are_taken() -> None:
    taken: list[stripe.Event] = []
    refusals = [500, 404]

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            payload = self.rfile.read(int(self.headers["Content-Length"]))
            event = stripe.Webhook.construct_event(payload, self.headers["Stripe-Signature"], "whsec_embedded")
            status = refusals.pop() if refusals else 200
            if status == 200:
                taken.append(event)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing to tell."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.02,))
        thread.start()
        try:
            with FakeStripe(webhook_url=f"http://127.0.0.1:{receiver.server_port}/") as fake:
                session = library(fake).checkout.sessions.create(ORDER)
                httpx.post(f"{fake.url}/_control", data={"webhooks": "hold"})
                httpx.post(session.url, data={"button": "pay"})
                assert (len(fake.held), taken) == (2, [])
                httpx.post(f"{fake.url}/_control", data={"webhooks": "deliver", "release": "1"})
                wait_until(lambda: len(fake.delivered) == 4, limit_s=20, what="both messages are taken")
                assert len(taken) == 2
                assert sorted(status for _, status in fake.delivered) == [200, 200, 404, 500]
                assert json.loads(httpx.get(fake.url).text)["held"] == 0
        finally:
            receiver.shutdown()
            thread.join()
