"""The payment provider behind a few questions: open a payment, pay a seller, give a payment back, how does it stand, is
this message really theirs.

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
from typing import Any, TypeVar

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
REFUSED = "payments_refused_for_good"
# Refusals of what was asked for that time cures.
PASSING = ("balance_insufficient", "lock_timeout", "idempotency_key_in_use")
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
    cents = _cents(order.amount_uusd)
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


@dataclass(frozen=True)
class Settlement:
    """What became of a payment in our balance there: what came of it after the provider's fee, once it can be used."""

    id: str
    available: bool
    gross_uusd: int
    fee_uusd: int


@dataclass(frozen=True)
class Payee:
    """A seller's account as the provider has it now."""

    id: str
    details_submitted: bool
    payouts_enabled: bool
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Sent:
    """Money that went out, as the provider has it now. `ref` is what we named it."""

    id: str
    ref: str
    amount_uusd: int
    done: bool
    failed: bool = False
    reversed_uusd: int = 0


@dataclass(frozen=True)
class Disputed:
    id: str
    payment_ref: str
    amount_uusd: int
    state: str  # open | won | lost | warning


@dataclass(frozen=True)
class Funds:
    available_uusd: int
    pending_uusd: int


def fetch_settlement(payment_ref: str) -> Settlement | None:
    """None while the provider has booked nothing for it."""
    asked: stripe.params.PaymentIntentRetrieveParams = {"expand": ["latest_charge.balance_transaction"]}
    intent = _call(lambda: _client().v1.payment_intents.retrieve(payment_ref, asked))
    charge = intent.latest_charge
    moved = None if charge is None or isinstance(charge, str) else charge.balance_transaction
    if moved is None or isinstance(moved, str):
        return None
    return Settlement(moved.id, moved.status == "available", moved.amount * UUSD_PER_CENT, moved.fee * UUSD_PER_CENT)


def open_payee(organisation_ref: str) -> Payee:
    """The seller's account: the one they already have, if they have one."""
    params: stripe.params.AccountCreateParams = {
        "type": "express",
        "capabilities": {"transfers": {"requested": True}},
        "metadata": {"organisation": organisation_ref},
    }
    accounts = _client().v1.accounts
    return _payee(_call(lambda: accounts.create(params, {"idempotency_key": f"seller:{organisation_ref}"})))


def fetch_payee(account_id: str) -> Payee:
    return _payee(_call(lambda: _client().v1.accounts.retrieve(account_id)))


def onboarding_url(account_id: str, *, back_url: str, again_url: str) -> str:
    """Where a seller tells the provider who they are. Good once and for a few minutes."""
    params: stripe.params.AccountLinkCreateParams = {
        "account": account_id,
        "type": "account_onboarding",
        "return_url": back_url,
        "refresh_url": again_url,
    }
    return _call(lambda: _client().v1.account_links.create(params)).url


def send_transfer(ref: str, account_id: str, amount_uusd: int) -> Sent:
    """Pay a seller. Asked again it is the same transfer. Raises Conflict where the provider will not, for good."""
    params: stripe.params.TransferCreateParams = {
        "amount": _cents(amount_uusd),
        "currency": "usd",
        "destination": account_id,
        "transfer_group": ref,
        "metadata": {"payout": ref},
    }
    transfers = _client().v1.transfers
    return _sent(_call(lambda: transfers.create(params, {"idempotency_key": f"payout:{ref}"}), final=True))


def find_transfer(ref: str) -> Sent | None:
    """The transfer that we named so: for a row so old that the provider has forgotten the key."""
    found = _call(lambda: _client().v1.transfers.list({"transfer_group": ref, "limit": 1})).data
    return _sent(found[0]) if found else None


def fetch_transfer(transfer_id: str) -> Sent:
    return _sent(_call(lambda: _client().v1.transfers.retrieve(transfer_id)))


def send_refund(ref: str, payment_ref: str, amount_uusd: int) -> Sent:
    """Give a part of a payment back to its card. Asked again it is the same refund. Raises Conflict where the provider
    will not, for good."""
    params: stripe.params.RefundCreateParams = {
        "payment_intent": payment_ref,
        "amount": _cents(amount_uusd),
        "metadata": {"card_refund": ref},
    }
    refunds = _client().v1.refunds
    return _returned(_call(lambda: refunds.create(params, {"idempotency_key": f"refund:{ref}"}), final=True))


def find_refund(ref: str, payment_ref: str) -> Sent | None:
    found = _call(lambda: _client().v1.refunds.list({"payment_intent": payment_ref, "limit": 100})).data
    return next((sent for each in found if (sent := _returned(each)).ref == ref), None)


def fetch_refund(refund_id: str) -> Sent:
    return _returned(_call(lambda: _client().v1.refunds.retrieve(refund_id)))


def fetch_dispute(dispute_id: str) -> Disputed:
    dispute = _call(lambda: _client().v1.disputes.retrieve(dispute_id))
    payment = dispute.payment_intent
    name = payment if isinstance(payment, str) or payment is None else payment.id
    state = dispute.status if dispute.status in ("won", "lost") else "open"
    if dispute.status.startswith("warning_"):
        state = "warning"  # asked about, and nothing taken
    return Disputed(dispute.id, name or "", dispute.amount * UUSD_PER_CENT, state)


def fetch_funds() -> Funds:
    """Our balance there, in dollars."""
    balance = _call(lambda: _client().v1.balance.retrieve())
    available, pending = (
        sum(each.amount for each in rows if each.currency == "usd") * UUSD_PER_CENT
        for rows in (balance.available, balance.pending)
    )
    return Funds(available, pending)


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


def _payee(account: stripe.Account) -> Payee:
    needs = account.requirements.currently_due if account.requirements is not None else None
    return Payee(account.id, bool(account.details_submitted), bool(account.payouts_enabled), tuple(needs or ()))


def _sent(transfer: stripe.Transfer) -> Sent:
    reversed_uusd = transfer.amount_reversed * UUSD_PER_CENT
    ref = _mark(transfer.metadata, "payout") or transfer.transfer_group or ""
    return Sent(transfer.id, ref, transfer.amount * UUSD_PER_CENT, done=True, reversed_uusd=reversed_uusd)


def _returned(refund: stripe.Refund) -> Sent:
    return Sent(
        id=refund.id,
        ref=_mark(refund.metadata, "card_refund"),
        amount_uusd=refund.amount * UUSD_PER_CENT,
        done=refund.status == "succeeded",
        failed=refund.status in ("failed", "canceled"),
    )


def _mark(metadata: Any, name: str) -> str:
    """What we wrote on an object of theirs; empty where it is not ours."""
    return str(metadata[name]) if metadata and name in metadata else ""


def _cents(amount_uusd: int) -> int:
    cents, rest = divmod(amount_uusd, UUSD_PER_CENT)
    if rest:
        raise ValueError("a card network moves whole cents")
    return cents


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


def _call(ask: Callable[[], T], *, final: bool = False) -> T:
    """`final`: a refusal of what was asked for is an answer, to which asking again is no cure."""
    # Refuses to begin inside a transaction, and knows the one that wraps a test.
    with transaction.atomic(durable=True):
        pass
    with _told_in_our_words(final=final):
        return ask()


@contextmanager
def _told_in_our_words(*, final: bool) -> Iterator[None]:
    try:
        yield
    except stripe.IdempotencyError as error:
        raise Conflict("this payment was already opened on other terms", code="changed_replay") from error
    except stripe.InvalidRequestError as error:
        if error.code == "resource_missing":
            raise NotFound("the payment provider does not know this payment") from error
        logger.error("the payment provider refused a request of ours: %s", error)
        if final and error.code not in PASSING:
            raise Conflict(error.user_message or "the payment provider refused it", code=REFUSED) from error
        raise Busy("the payment page cannot be opened now", code="payments_refused") from error
    except stripe.StripeError as error:
        # Its limits, its failures, the network between us; a wrong key is ours to mend, and the customer waits alike.
        logger.warning("the payment provider did not answer: %s", error)
        raise Busy(
            "the payment provider does not answer; nothing was charged", code="payments_unavailable", retry_after_s=5
        ) from error
