"""The payment provider behind three questions: open a payment, how does it stand, is this message really theirs.

The only importer of `stripe`. Invariant: no call is made inside a transaction of the database (a slow provider would
hold its locks, and a rollback could not take a payment back), and a repeated call is the same call: its idempotency
key and its parameters come from the row alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TypeVar

import stripe
from django.conf import settings
from django.db import transaction

from marketplace.core.errors import Busy, Conflict, NotFound, Problem
from marketplace.core.money import UUSD_PER_CENT

logger = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_S = 10
# The library repeats with the same idempotency key, half a second later. More is the sweep's business: a person waits.
NETWORK_RETRIES = 1
SIGNATURE_HEADER = "Stripe-Signature"


@dataclass(frozen=True)
class Order:
    """What is to be paid. All of it comes from a row and the settings, so that asking again is asking the same."""

    ref: str
    amount_uusd: int
    expires_at: datetime
    paid_url: str
    unpaid_url: str


@dataclass(frozen=True)
class Checkout:
    """A payment as the provider has it now. `payment_ref` is None until somebody tried to pay."""

    id: str
    order_ref: str
    open: bool
    expired: bool
    pay_url: str | None
    amount_uusd: int
    payment_ref: str | None
    paid_uusd: int | None  # None: nothing was received
    declined: str | None  # why the last try was refused, in the provider's words


@dataclass(frozen=True)
class Message:
    """A verified event. It says where to look; what is true there is asked anew."""

    id: str
    kind: str
    object_id: str
    order_ref: str  # empty where the object carries none


def open_checkout(order: Order) -> Checkout:
    """The payment page of that order: the one it already has, if it has one."""
    cents, rest = divmod(order.amount_uusd, UUSD_PER_CENT)
    if rest:
        raise ValueError("a card is charged whole cents")
    marks = {"top_up": order.ref}
    params: stripe.params.checkout.SessionCreateParams = {
        "mode": "payment",
        "line_items": [
            {
                "quantity": 1,
                "price_data": {
                    "currency": "usd",
                    "unit_amount": cents,
                    "product_data": {"name": "Archipelago balance"},
                },
            }
        ],
        "client_reference_id": order.ref,
        "metadata": marks,
        "payment_intent_data": {"metadata": marks},
        "success_url": order.paid_url,
        "cancel_url": order.unpaid_url,
        "expires_at": int(order.expires_at.timestamp()),
    }
    sessions = _client().v1.checkout.sessions
    return _checkout(_call(lambda: sessions.create(params, {"idempotency_key": f"top-up:{order.ref}"})))


def fetch_checkout(checkout_id: str) -> Checkout:
    sessions = _client().v1.checkout.sessions
    return _checkout(_call(lambda: sessions.retrieve(checkout_id)))


def read_message(payload: bytes, signature: str) -> Message:
    """Verify a webhook's signature by any secret in use, and read it. Raises a 400."""
    for secret in settings.STRIPE_WEBHOOK_SECRETS:
        try:
            stripe.WebhookSignature.verify_header(payload, signature, secret, stripe.Webhook.DEFAULT_TOLERANCE)
        except (stripe.SignatureVerificationError, UnicodeDecodeError):
            continue
        try:
            event = json.loads(payload)
            about = event["data"]["object"]
            marks = about.get("metadata") or {}
            order_ref = str(marks.get("top_up") or about.get("client_reference_id") or "")
            return Message(str(event["id"]), str(event["type"]), str(about.get("id") or ""), order_ref)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Problem("this is no event", code="bad_event") from error
    raise Problem("the signature is not ours, or too old", code="bad_signature")


def _checkout(session: stripe.checkout.Session) -> Checkout:
    """With the state of its payment, which the session itself does not tell in full."""
    payment = session.payment_intent
    payment_ref = payment if isinstance(payment, str) or payment is None else payment.id
    paid_uusd, declined = None, None
    if payment_ref is not None:
        name = payment_ref
        intent = _call(lambda: _client().v1.payment_intents.retrieve(name))
        if intent.status == "succeeded":
            # Another currency is another amount: it matches no order.
            paid_uusd = intent.amount_received * UUSD_PER_CENT if intent.currency == "usd" else -1
        elif intent.last_payment_error is not None:
            declined = intent.last_payment_error.message or "The payment was declined."
    return Checkout(
        id=session.id,
        order_ref=session.client_reference_id or "",
        open=session.status == "open",
        expired=session.status == "expired",
        pay_url=session.url,
        amount_uusd=(session.amount_total or 0) * UUSD_PER_CENT,
        payment_ref=payment_ref,
        paid_uusd=paid_uusd,
        declined=declined,
    )


def _client() -> stripe.StripeClient:
    return _client_of(settings.STRIPE_SECRET_KEY, settings.STRIPE_API_BASE)


@cache
def _client_of(key: str, api_base: str | None) -> stripe.StripeClient:
    return stripe.StripeClient(
        key,
        base_addresses={"api": api_base} if api_base else {},
        max_network_retries=NETWORK_RETRIES,
        http_client=stripe.RequestsClient(timeout=TIMEOUT_S),
    )


def _call(ask: Callable[[], T]) -> T:
    # Refuses to begin inside a transaction, and knows the one that wraps a test.
    with transaction.atomic(durable=True):
        pass
    with _told_in_our_words():
        return ask()


@contextmanager
def _told_in_our_words() -> Iterator[None]:
    try:
        yield
    except stripe.IdempotencyError as error:
        raise Conflict("this payment was already opened on other terms", code="changed_replay") from error
    except stripe.InvalidRequestError as error:
        if error.code == "resource_missing":
            raise NotFound("the payment provider does not know this payment") from error
        logger.error("the payment provider refused a request of ours: %s", error)
        raise Busy("the payment page cannot be opened now", code="payments_refused") from error
    except stripe.StripeError as error:
        # Its limits, its failures, the network between us; a wrong key is ours to mend, and the customer waits alike.
        logger.warning("the payment provider did not answer: %s", error)
        raise Busy(
            "the payment provider does not answer; nothing was charged", code="payments_unavailable", retry_after_s=5
        ) from error
