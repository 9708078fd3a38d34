"""Money in, against the provider's stand-in over HTTP: lost, repeated or late, a payment counts once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from marketplace.accounts.access import Actor
from marketplace.accounts.models import AuditEvent
from marketplace.billing import gateway
from marketplace.billing.models import StripeEvent, TopUp, TopUpState, Transfer
from marketplace.billing.selectors import balances
from marketplace.billing.services import inbox
from marketplace.billing.services.topups import open_payment, reconcile_top_ups, settle_top_up, start_top_up
from marketplace.billing.tasks import drain_inbox
from marketplace.core.clock import database_now
from marketplace.core.errors import Busy, InvalidInput
from tests.fakes.stripe import FakeStripe
from tests.servers import wait_until

pytestmark = pytest.mark.django_db

USD = 1_000_000


@pytest.fixture
def opened(buyer: Actor, stripe: FakeStripe) -> TopUp:
    """A top-up of 25 dollars whose payment page is open."""
    now = database_now()
    return open_payment(start_top_up(buyer, amount_uusd=25 * USD, now=now).pk, now)


def cash_uusd(top_up: TopUp) -> int:
    return balances(top_up.organisation).cash_uusd


def test_a_payment_becomes_cash_when_its_message_has_come(
    opened: TopUp, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    assert opened.state == TopUpState.PENDING
    assert pay(opened.pay_url).endswith(f"/money/top-ups/{opened.pk}?back=paid")
    assert cash_uusd(opened) == 0
    assert deliver() == 200
    drain_inbox()
    opened.refresh_from_db()
    assert (opened.state, cash_uusd(opened)) == (TopUpState.PAID, 25 * USD)
    said = AuditEvent.objects.filter(object_id=opened.pk).order_by("pk").values_list("action", flat=True)
    assert list(said) == ["top_up.created", "top_up.paid"]


def test_a_message_that_comes_twice_is_one_deposit(
    opened: TopUp, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    pay(opened.pay_url)
    for _ in range(2):
        assert deliver() == 200
        drain_inbox()
    assert Transfer.objects.count() == 1
    assert StripeEvent.objects.filter(processed_at=None).count() == 0
    assert cash_uusd(opened) == 25 * USD


@pytest.mark.parametrize("kind", ["payment_intent.", "checkout.session."])
def test_any_one_of_the_messages_is_enough(
    opened: TopUp, kind: str, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    pay(opened.pay_url)
    assert deliver(kind) == 200
    drain_inbox()
    assert cash_uusd(opened) == 25 * USD


def test_a_message_after_the_provider_was_asked_changes_nothing(
    opened: TopUp, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    pay(opened.pay_url)
    later = database_now() + timedelta(minutes=2)
    assert reconcile_top_ups(later) == 1
    assert cash_uusd(opened) == 25 * USD
    assert deliver() == 200
    drain_inbox()
    assert (Transfer.objects.count(), cash_uusd(opened)) == (1, 25 * USD)


def test_a_lost_answer_and_a_retry_are_one_payment_page(buyer: Actor, stripe: FakeStripe) -> None:
    now = database_now()
    top_up = start_top_up(buyer, amount_uusd=25 * USD, now=now)
    stripe.fail_next(*["drop"] * (1 + gateway.NETWORK_RETRIES))
    with pytest.raises(Busy):
        open_payment(top_up.pk, now)
    again = open_payment(top_up.pk, now)
    assert list(stripe.sessions) == [again.checkout_id]
    assert open_payment(top_up.pk, now).checkout_id == again.checkout_id


def test_a_page_whose_answer_was_lost_can_be_paid_all_the_same(
    buyer: Actor, stripe: FakeStripe, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    now = database_now()
    top_up = start_top_up(buyer, amount_uusd=25 * USD, now=now)
    stripe.fail_next(*["drop"] * (1 + gateway.NETWORK_RETRIES))
    with pytest.raises(Busy):
        open_payment(top_up.pk, now)
    (session,) = stripe.sessions.values()
    pay(session["url"])
    deliver("payment_intent.")
    drain_inbox()
    assert cash_uusd(top_up) == 25 * USD


def test_a_top_up_the_provider_did_not_hear_of_is_opened_by_the_sweep(buyer: Actor, stripe: FakeStripe) -> None:
    now = database_now()
    top_up = start_top_up(buyer, amount_uusd=25 * USD, now=now)
    assert reconcile_top_ups(now) == 0
    assert reconcile_top_ups(now + timedelta(minutes=1)) == 1
    top_up.refresh_from_db()
    assert (top_up.state, top_up.pay_url) == (TopUpState.PENDING, f"{stripe.url}/c/pay/{top_up.checkout_id}")


@pytest.mark.parametrize("signature", ["", "nonsense", "t=1,v1=00"])
def test_a_message_without_a_signature_of_theirs_is_refused_and_not_stored(
    opened: TopUp, signature: str, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    pay(opened.pay_url)
    assert deliver("", signature) == 400
    assert StripeEvent.objects.count() == 0


def test_a_signature_that_is_too_old_is_refused(stripe: FakeStripe) -> None:
    old = stripe.sign("{}", at_s=int(database_now().timestamp()) - 3600)
    with pytest.raises(Exception, match="too old"):
        gateway.read_message(b"{}", old)


def test_a_declined_card_leaves_no_money_and_the_page_open(
    opened: TopUp, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    assert pay(opened.pay_url, "decline").endswith("?back=unpaid")
    deliver()
    drain_inbox()
    opened.refresh_from_db()
    assert (opened.state, opened.problem) == (TopUpState.PENDING, "Your card was declined.")
    assert cash_uusd(opened) == 0
    pay(opened.pay_url)
    assert settle_top_up(opened.pk, database_now()).state == TopUpState.PAID
    assert cash_uusd(opened) == 25 * USD


def test_another_amount_than_was_asked_for_is_an_alarm_and_no_money(
    opened: TopUp, stripe: FakeStripe, pay: Callable[..., str], deliver: Callable[..., int], caplog: Any
) -> None:
    stripe.tamper(opened.checkout_id or "", 2_600)
    pay(opened.pay_url)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            deliver()
            drain_inbox()
            settle_top_up(opened.pk, database_now())
    opened.refresh_from_db()
    assert (opened.state, cash_uusd(opened)) == (TopUpState.FAILED, 0)
    assert [record.levelname for record in caplog.records if opened.pk in record.message] == ["ERROR"]
    assert AuditEvent.objects.filter(object_id=opened.pk, action="top_up.mismatched").count() == 1


def test_a_page_nobody_paid_on_expires(opened: TopUp, stripe: FakeStripe, deliver: Callable[..., int]) -> None:
    stripe.sessions[opened.checkout_id or ""]["expires_at"] = 1
    assert settle_top_up(opened.pk, database_now()).state == TopUpState.EXPIRED
    deliver()
    drain_inbox()
    opened.refresh_from_db()
    assert (opened.state, cash_uusd(opened)) == (TopUpState.EXPIRED, 0)


def test_a_provider_that_fails_keeps_the_message_for_later(
    opened: TopUp, stripe: FakeStripe, pay: Callable[..., str], deliver: Callable[..., int]
) -> None:
    pay(opened.pay_url)
    deliver("payment_intent.")
    now = database_now()
    stripe.fail_next("500", "429")
    assert inbox.drain(now) == 0
    event = StripeEvent.objects.get()
    assert (event.attempts, event.processed_at, cash_uusd(opened)) == (1, None, 0)
    assert inbox.drain(now) == 0, "not before its time"
    assert inbox.drain(event.due_at) == 1
    assert cash_uusd(opened) == 25 * USD


def test_messages_about_what_is_not_ours_are_taken_and_put_aside(
    opened: TopUp, stripe: FakeStripe, deliver: Callable[..., int]
) -> None:
    stripe._tell("payment_intent.succeeded", {"id": "pi_other", "metadata": {}})
    stripe._tell("customer.created", {"id": "cus_1"})
    assert deliver() == 200
    drain_inbox()
    assert StripeEvent.objects.filter(processed_at=None).count() == 0
    assert cash_uusd(opened) == 0


@pytest.mark.parametrize("amount_uusd", [0, -5 * USD, 4_990_000, 50_000_010_000, 5_000_001])
def test_an_amount_a_card_cannot_pay_is_refused_by_its_field(buyer: Actor, amount_uusd: int) -> None:
    with pytest.raises(InvalidInput) as refusal:
        start_top_up(buyer, amount_uusd=amount_uusd, now=database_now())
    assert [problem.field for problem in refusal.value.fields] == ["amount_uusd"]


def test_the_provider_is_never_called_inside_a_transaction(opened: TopUp, stripe: FakeStripe) -> None:
    before = list(stripe.requests)
    with transaction.atomic(), pytest.raises(RuntimeError):
        settle_top_up(opened.pk, database_now())
    assert stripe.requests == before


@pytest.mark.django_db(transaction=True)
def test_messages_delivered_twice_over_the_network_are_one_deposit(
    live_server: LiveServer, settings: Settings, buyer: Actor, stripe: FakeStripe, pay: Callable[..., str]
) -> None:
    settings.PUBLIC_URL = live_server.url
    stripe.webhook_url = f"{live_server.url}/billing/stripe/webhook"
    stripe.webhooks("twice")
    now = database_now()
    top_up = open_payment(start_top_up(buyer, amount_uusd=25 * USD, now=now).pk, now)
    assert pay(top_up.pay_url).startswith(live_server.url)
    wait_until(lambda: len(stripe.delivered) == 4, limit_s=20, what="both messages are taken, twice each")
    assert {status for _, status in stripe.delivered} == {200}
    drain_inbox()
    assert (Transfer.objects.count(), cash_uusd(top_up)) == (1, 25 * USD)
