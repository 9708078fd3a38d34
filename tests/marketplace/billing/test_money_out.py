"""Money out, against the provider's stand-in over HTTP: settlement, sellers' accounts, payouts, refunds, disputes."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.test import Client
from pytest_django import Settings

from marketplace.accounts.access import Actor
from marketplace.accounts.models import Membership, Organisation, Role, User
from marketplace.billing import gateway
from marketplace.billing.models import (
    AccountKind,
    CardRefund,
    CardRefundState,
    DisputeState,
    LedgerAccount,
    PaymentDispute,
    Payout,
    PayoutState,
    SellerAccount,
    TopUp,
    Transfer,
)
from marketplace.billing.services import inbox, payouts
from marketplace.billing.services.books import compare_books
from marketplace.billing.services.card_refunds import refund_cash, sweep_refunds
from marketplace.billing.services.freezing import is_frozen
from marketplace.billing.services.maturing import mature_earnings
from marketplace.billing.services.payouts import (
    open_seller_account,
    request_payout,
    start_payout,
    sweep_payouts,
)
from marketplace.billing.services.settling import settle_payments
from marketplace.billing.services.topups import open_payment, settle_top_up, start_top_up
from marketplace.billing.tasks import drain_inbox
from marketplace.core.clock import database_now
from marketplace.core.errors import Busy, Conflict, InvalidInput
from tests.fakes.stripe import FakeStripe
from tests.marketplace.billing.sales import USD, balance, organisation, sold

NOW = timedelta(0)
EARNED = 600 * 100_000 * 95 // 100  # ten hours of one GPU, less our part
pytestmark = pytest.mark.django_db


@pytest.fixture
def paid(buyer: Actor, stripe: FakeStripe, pay: Callable[..., str]) -> TopUp:
    """A hundred dollars that came in, and can be paid out of."""
    now = database_now()
    top_up = open_payment(start_top_up(buyer, amount_uusd=100 * USD, now=now).pk, now)
    pay(top_up.pay_url)
    settle_top_up(top_up.pk, now)
    settle_payments(now, NOW)
    return TopUp.objects.get(pk=top_up.pk)


@pytest.fixture
def seller(paid: TopUp) -> Actor:
    """Who earned sixty dollars of it, less the fee, and was told to be paid."""
    actor = Actor(organisation("seller"), Role.OWNER, "test")
    sold("lse_1", paid.organisation, actor.organisation, minutes=600)
    mature_earnings(database_now())
    return actor


@pytest.fixture
def known(seller: Actor, onboard: Callable[[Actor], None]) -> Actor:
    onboard(seller)
    return seller


@pytest.fixture
def onboard(stripe: FakeStripe) -> Callable[[Actor], None]:
    def walk(actor: Actor) -> None:
        answer = httpx.post(open_seller_account(actor, database_now()), data={"button": "done"})
        assert answer.status_code == 303
        payouts.refresh_seller_account(actor.organisation, database_now())

    return walk


def sums() -> dict[str, int]:
    found: dict[str, int] = {}
    for row in LedgerAccount.objects.all():
        found[row.kind] = found.get(row.kind, 0) + row.balance_uusd
    return {kind: amount for kind, amount in found.items() if amount}


def test_a_payment_becomes_available_less_the_providers_fee_and_once(paid: TopUp) -> None:
    fee = 100 * USD * 29 // 1000 + 300_000
    for _ in range(2):
        settle_payments(database_now() + timedelta(hours=1), NOW)
    assert sums() == {"stripe_available": 100 * USD - fee, "stripe_fees": fee, "buyer_cash": 100 * USD}
    assert compare_books().unexplained_uusd == 0


def test_what_is_not_available_yet_is_waited_for(
    buyer: Actor, stripe: FakeStripe, pay: Callable[..., str], settings: Settings
) -> None:
    stripe.settles_after_s = 1_000_000
    now = database_now()
    top_up = open_payment(start_top_up(buyer, amount_uusd=100 * USD, now=now).pk, now)
    pay(top_up.pay_url)
    settle_top_up(top_up.pk, now)
    assert settle_payments(now, NOW) == 0
    books = compare_books()
    assert (books.unexplained_uusd, books.fees_to_come_uusd) == (0, 3_200_000)
    with pytest.raises(Conflict) as refused:
        refund_cash(buyer, 10 * USD, now)
    assert refused.value.code == "not_available_yet"


def test_a_seller_is_paid_once_the_provider_knows_them(known: Actor, stripe: FakeStripe) -> None:
    assert SellerAccount.objects.get().payouts_enabled
    payout = request_payout(known, database_now())
    assert (payout.state, payout.amount_uusd) == (PayoutState.PAID, EARNED)
    (transfer,) = stripe.transfers.values()
    assert (transfer["amount"], transfer["transfer_group"]) == (EARNED // 10_000, payout.pk)
    assert balance(known.organisation, AccountKind.SELLER_PAYABLE) == 0
    assert compare_books().unexplained_uusd == 0
    with pytest.raises(Conflict):
        request_payout(known, database_now())


def test_who_is_not_known_to_the_provider_is_told_so_and_keeps_their_money(seller: Actor) -> None:
    with pytest.raises(Conflict) as refused:
        request_payout(seller, database_now())
    assert "where to pay you" in refused.value.message
    assert balance(seller.organisation, AccountKind.SELLER_PAYABLE) == EARNED


def test_the_first_payout_waits_and_a_small_one_is_not_made(known: Actor, settings: Settings) -> None:
    settings.PAYOUT_LEAST_UUSD = 100 * USD
    assert "is the least" in payouts.why_not(known.organisation, database_now())
    settings.PAYOUT_LEAST_UUSD = USD
    settings.FIRST_PAYOUT_DAYS = 10_000
    assert "after the first sale" in payouts.why_not(known.organisation, database_now())


@pytest.mark.parametrize("fault", ["drop", "500", "429"])
def test_a_payout_whose_answer_was_lost_is_one_transfer(known: Actor, stripe: FakeStripe, fault: str) -> None:
    stripe.fail_next(*[fault] * (1 if fault == "429" else 2))  # the library itself repeats the others once
    payout = request_payout(known, database_now())
    assert payout.state == PayoutState.CREATED
    assert balance(known.organisation, AccountKind.SELLER_PAYABLE) == EARNED  # pends, not gone
    assert sweep_payouts(database_now() + timedelta(minutes=2)) == 1
    payout.refresh_from_db()
    assert payout.state == PayoutState.PAID
    assert len(stripe.transfers) == 1
    assert compare_books().unexplained_uusd == 0


def test_a_payout_older_than_the_providers_memory_is_looked_for_before_it_is_asked_for_again(
    known: Actor, stripe: FakeStripe
) -> None:
    stripe.fail_next("drop", "drop")
    payout = request_payout(known, database_now())
    stripe.answers.clear()  # a day later the key is forgotten
    sweep_payouts(database_now() + timedelta(hours=30))
    payout.refresh_from_db()
    assert (payout.state, len(stripe.transfers)) == (PayoutState.PAID, 1)


def test_a_payout_refused_for_good_gives_the_money_back(known: Actor, stripe: FakeStripe) -> None:
    for account in stripe.accounts.values():
        account["payouts_enabled"] = False
    payout = request_payout(known, database_now())
    assert (payout.state, "capability" in payout.problem) == (PayoutState.FAILED, True)
    assert balance(known.organisation, AccountKind.SELLER_PAYABLE) == EARNED
    assert LedgerAccount.objects.get(kind=AccountKind.SELLER_PAYABLE).available_uusd == EARNED


def test_the_week_pays_by_itself_and_once(known: Actor, stripe: FakeStripe) -> None:
    for hours in (0, 1, 24):
        sweep_payouts(database_now() + timedelta(hours=hours))
    assert [payout.state for payout in Payout.objects.all()] == [PayoutState.PAID]


def test_nothing_is_paid_out_of_money_that_is_not_there_yet(known: Actor) -> None:
    LedgerAccount.objects.get(kind=AccountKind.STRIPE_AVAILABLE)
    drained = refund_cash(Actor(TopUp.objects.get().organisation, Role.OWNER, "t"), 40 * USD, database_now())
    assert drained[0].state == CardRefundState.PAID
    with pytest.raises(Conflict) as refused:
        start_payout(known.organisation, by="t", now=database_now())
    assert refused.value.code == "not_available_yet"


def test_what_is_taken_back_of_a_payout_is_payable_again(
    known: Actor, stripe: FakeStripe, deliver: Callable[..., int]
) -> None:
    payout = request_payout(known, database_now())
    stripe.reverse(payout.transfer_id or "", 1_000)
    for _ in range(2):
        deliver("transfer.")
        drain_inbox()
    payout.refresh_from_db()
    assert (payout.state, payout.reversed_uusd) == (PayoutState.PAID, 10 * USD)
    assert balance(known.organisation, AccountKind.SELLER_PAYABLE) == 10 * USD
    stripe.reverse(payout.transfer_id or "", EARNED // 10_000 - 1_000)
    deliver("transfer.")
    drain_inbox()
    payout.refresh_from_db()
    assert payout.state == PayoutState.REVERSED
    assert compare_books().unexplained_uusd == 0


def test_cash_goes_back_to_the_cards_it_came_from(
    paid: TopUp, buyer: Actor, stripe: FakeStripe, pay: Callable[..., str]
) -> None:
    now = database_now()
    second = open_payment(start_top_up(buyer, amount_uusd=50 * USD, now=now).pk, now)
    pay(second.pay_url)
    settle_top_up(second.pk, now)
    settle_payments(now, NOW)
    rows = refund_cash(buyer, 70 * USD, now)
    assert sorted(row.amount_uusd for row in rows) == [20 * USD, 50 * USD]
    assert {row.state for row in rows} == {CardRefundState.PAID}
    assert balance(buyer.organisation, AccountKind.BUYER_CASH) == 80 * USD
    assert compare_books().unexplained_uusd == 0


@pytest.mark.parametrize("amount", [0, -1, 101 * USD, 5])
def test_a_refund_that_cannot_be_names_its_field(paid: TopUp, buyer: Actor, amount: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        refund_cash(buyer, amount, database_now())
    assert refused.value.fields[0].field == "amount_uusd"
    assert not CardRefund.objects.exists()


def test_a_refund_whose_answer_was_lost_is_one_refund(paid: TopUp, buyer: Actor, stripe: FakeStripe) -> None:
    stripe.fail_next("drop", "drop")
    (row,) = refund_cash(buyer, 10 * USD, database_now())
    assert row.state == CardRefundState.CREATED
    sweep_refunds(database_now() + timedelta(minutes=2))
    row.refresh_from_db()
    assert (row.state, len(stripe.refunds)) == (CardRefundState.PAID, 1)
    assert balance(buyer.organisation, AccountKind.BUYER_CASH) == 90 * USD


def test_a_disputed_payment_is_taken_once_freezes_and_comes_back_when_won(
    paid: TopUp, buyer: Actor, stripe: FakeStripe, deliver: Callable[..., int]
) -> None:
    before = sums()
    dispute = stripe.dispute(paid.payment_ref or "")
    for _ in range(2):
        deliver("charge.dispute.")
        drain_inbox()
    assert balance(buyer.organisation, AccountKind.BUYER_CASH) == 0
    assert is_frozen(buyer.organisation)
    assert compare_books().unexplained_uusd == 0
    stripe.decide(dispute, won=True)
    for _ in range(2):
        deliver("charge.dispute.")
        drain_inbox()
    assert PaymentDispute.objects.get().state == DisputeState.WON
    assert sums() == before
    assert not is_frozen(buyer.organisation)


def test_what_was_spent_of_a_disputed_payment_is_owed_and_keeps_the_freeze(
    seller: Actor, buyer: Actor, stripe: FakeStripe, deliver: Callable[..., int]
) -> None:
    dispute = stripe.dispute(TopUp.objects.get().payment_ref or "")
    stripe.decide(dispute, won=False)
    deliver("charge.dispute.")
    drain_inbox()
    row = PaymentDispute.objects.get()
    assert (row.state, row.from_cash_uusd, row.owed_uusd) == (DisputeState.LOST, 40 * USD, 60 * USD)
    assert balance(buyer.organisation, AccountKind.BUYER_RECEIVABLE) == 60 * USD
    assert is_frozen(buyer.organisation)


def test_in_whatever_order_messages_come_the_ledger_is_the_same(
    known: Actor, buyer: Actor, stripe: FakeStripe, deliver: Callable[..., int]
) -> None:
    """One journey's messages in many orders, some twice: every order leaves every balance as the first did."""
    payout = request_payout(known, database_now())
    stripe.reverse(payout.transfer_id or "", 500)
    refund_cash(buyer, 10 * USD, database_now())
    dispute = stripe.dispute(TopUp.objects.get().payment_ref or "")
    stripe.decide(dispute, won=True)
    told = [event for event in stripe.events.values() if not event["type"].startswith("checkout")]
    rng = random.Random(7)
    seen = set()
    for number in range(20):
        order = [*told, *rng.sample(told, 2)]
        rng.shuffle(order)
        for event in order:
            message = gateway.Message(f"{event['id']}_{number}", event["type"], event["data"]["object"]["id"], "")
            inbox.take(message, database_now())
        inbox.drain(database_now())
        facts: Any = (tuple(sorted(sums().items())), Transfer.objects.count())
        seen.add(facts)
    assert len(seen) == 1
    assert compare_books().unexplained_uusd == 0


def test_a_provider_that_is_away_is_said_and_nothing_is_lost(known: Actor, stripe: FakeStripe) -> None:
    stripe.fail_next("500", "500")
    with pytest.raises(Busy):
        open_seller_account(known, database_now())


def test_another_organisations_money_is_not_touched(known: Actor, buyer: Actor) -> None:
    stranger: Organisation = organisation("stranger")
    with pytest.raises(InvalidInput):
        refund_cash(Actor(stranger, Role.OWNER, "t"), USD, database_now())


def test_the_page_leads_through_the_set_up_to_the_payout(
    seller: Actor, stripe: FakeStripe, client: Client, deliver: Callable[..., int]
) -> None:
    user = User.objects.create_user("bob@example.org", "correct horse battery")
    Membership.objects.create(user=user, organisation=seller.organisation, role=Role.OWNER)
    client.force_login(user)
    shown = client.get("/money/payouts").content.decode()
    assert "Set up payouts" in shown
    link = client.post("/money/payouts/set-up")["Location"]
    back = httpx.post(link, data={"button": "done"}).headers["Location"]
    assert back.endswith("/money/payouts?back=1")
    assert httpx.get(link).status_code == 410
    shown = client.get("/money/payouts?back=1").content.decode()
    assert "Pay out now" in shown
    answer = client.post("/money/payouts/pay-out", follow=True).content.decode()
    assert "Paid out: $57.00" in answer
    again = client.post("/money/payouts/pay-out", follow=True).content.decode()
    assert "Nothing was paid out" in again
    assert "Payout" in client.get("/money").content.decode()


def test_cash_is_returned_from_the_page_and_what_cannot_be_is_said_at_its_field(
    paid: TopUp, ada: User, client: Client
) -> None:
    client.force_login(ada)
    refused = client.post("/money/payouts/refund", {"amount": "1000"})
    assert (refused.status_code, "is there to give back" in refused.content.decode()) == (422, True)
    assert "Returned." in client.post("/money/payouts/refund", {"amount": "12.50"}, follow=True).content.decode()
    assert balance(paid.organisation, AccountKind.BUYER_CASH) == 87_500_000


def test_money_goes_out_over_rest_once_for_each_key(paid: TopUp, api: Callable[..., Any], stripe: FakeStripe) -> None:
    assert api("POST", "/api/v1/card-refunds", {"amount_uusd": USD}).status_code == 422
    for _ in range(2):
        answer = api("POST", "/api/v1/card-refunds", {"amount_uusd": 10 * USD}, key="1")
        assert (answer.status_code, answer.json()[0]["state"]) == (201, "paid")
    assert len(stripe.refunds) == 1
    assert len(api("GET", "/api/v1/card-refunds").json()) == 1
    seen = api("GET", "/api/v1/payouts").json()
    assert (seen["account"], "where to pay you" in seen["why_not"]) == (None, True)
    assert api("POST", "/api/v1/payouts", {}, key="2").json()["code"] == "no_payout"
    assert api("POST", "/api/v1/payouts/onboarding", {}).json()["url"].startswith(stripe.url)
