"""The operators' pages of the money: audits on the record, what waits, and corrections by two people."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test import Client

from marketplace.accounts.models import User
from marketplace.accounts.services import ensure_organisation
from marketplace.billing import desk
from marketplace.billing.models import AccountKind, Correction, CorrectionState, LedgerCheck, Transfer, TransferKind
from marketplace.billing.services.audits import KEPT, run_audit
from marketplace.billing.services.corrections import left_uusd
from marketplace.billing.services.holds import cash
from marketplace.core.clock import database_now
from tests.fakes.stripe import FakeStripe
from tests.marketplace.billing.sales import USD, at, balance, organisation, sold

pytestmark = pytest.mark.django_db

PAGES = ("/desk/ledger", "/desk/corrections")


def operator_named(email: str) -> Client:
    user = User.objects.create_user(email, "correct horse battery", is_staff=True)
    ensure_organisation(user)
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def op(db: None) -> Client:
    return operator_named("one@example.org")


@pytest.fixture
def other(db: None) -> Client:
    return operator_named("two@example.org")


def deposit_of(who: object) -> Transfer:
    return Transfer.objects.get(kind=TransferKind.DEPOSIT, credit__organisation=who)


def form(client: Client, transfer: Transfer, amount: str = "5", reason: str = "paid twice") -> dict[str, str]:
    context = client.get("/desk/corrections", {"transfer": str(transfer.pk)}).context
    return {"transfer": str(transfer.pk), "amount": amount, "reason": reason, "ticket": context["ticket"]}


@pytest.mark.parametrize("path", PAGES)
def test_it_is_not_there_for_anybody_but_operators(client: Client, ada: User, path: str) -> None:
    assert client.get(path).status_code == 302
    client.force_login(ada)
    assert client.get(path).status_code == 404
    for action in ("/desk/ledger/audit", "/desk/ledger/books", "/desk/corrections/ask", "/desk/corrections/x/decide"):
        assert client.post(action).status_code == 404
    assert not LedgerCheck.objects.exists()


def test_before_the_first_audit_the_page_claims_nothing(op: Client) -> None:
    page = op.get("/desk/ledger").content.decode()
    assert "not looked at yet" in page
    assert "all hold" not in page


def test_an_audit_is_on_the_record_with_who_ran_it(op: Client) -> None:
    organisation("buyer", 100)
    assert op.post("/desk/ledger/audit").status_code == 302
    row = LedgerCheck.objects.get()
    assert (row.broken, row.alarms) == ([], [])
    page = op.get("/desk/ledger").content.decode()
    assert "all hold" in page
    assert "one@example.org" in page
    assert "$100.00" in page


def test_what_is_broken_is_named_counted_and_an_error_in_the_log(op: Client, caplog: pytest.LogCaptureFixture) -> None:
    buyer = organisation("buyer", 100)
    with transaction.atomic():
        with connection.cursor() as cursor:
            # As somebody would who has the database's own rights and no respect.
            cursor.execute("SET LOCAL session_replication_role = replica")
            cursor.execute(
                "UPDATE billing_ledgeraccount SET credits_posted_uusd = credits_posted_uusd + 1"
                " WHERE kind = 'buyer_cash' AND organisation_id = %s",
                [buyer.pk],
            )
            cursor.execute("SET LOCAL session_replication_role = origin")
        with caplog.at_level(logging.ERROR):
            row = run_audit(database_now())
        assert {each["invariant"][:3] for each in row.broken} == {"I1 ", "I2 "}
        assert "the ledger is broken: I2" in caplog.text
        page = op.get("/desk/ledger").content.decode()
        assert "2 broken" in page
        assert str(cash(buyer).pk) in page
        transaction.set_rollback(True)


def test_old_audits_are_dropped(db: None) -> None:
    now = database_now()
    run_audit(now - KEPT - timedelta(minutes=1))
    run_audit(now)
    assert LedgerCheck.objects.count() == 1


def test_the_totals_are_both_sides_of_the_same_money(db: None) -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    sold("lse_1", buyer, seller)
    totals = desk.totals()
    assert sum(t.balance_uusd for t in totals if t.grows_by_debits) == 100 * USD
    assert sum(t.balance_uusd for t in totals if not t.grows_by_debits) == 100 * USD
    assert desk.sum_of(desk.WE_HAVE, totals) == 100 * USD


def test_what_waits_is_late_once_it_waits_longer_than_is_normal(op: Client) -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    meter = sold("lse_1", buyer, seller, close=False)
    found = {each.words: each for each in desk.waiting(at(hours=2))}
    open_meter = found["Meters open after their window"]
    assert (open_meter.count, open_meter.oldest_at) == (1, meter.end_at)
    assert open_meter.late(at(hours=2))
    assert not open_meter.late(meter.end_at + timedelta(minutes=1))
    assert found.keys() == {"Meters open after their window"}
    assert '<span class="badge bad">Late</span>' in op.get("/desk/ledger").content.decode()


def test_the_age_of_a_debt_is_that_of_its_first_move_since_there_was_none(db: None) -> None:
    from marketplace.billing.ledger import Entry, account, post
    from marketplace.core.ids import fact_id

    seller = organisation("seller", 10)
    owes, has = account(AccountKind.SELLER_RECEIVABLE, seller), cash(seller)
    for number, (debit, credit, amount) in enumerate([(owes, has, 5), (has, owes, 5), (owes, has, 2), (owes, has, 1)]):
        post([Entry(fact_id("debt", number), TransferKind.CORRECTION, debit, credit, amount, "debt")])
    third = Transfer.objects.get(pk=fact_id("debt", 2))
    found = {each.words: each for each in desk.waiting(database_now())}["Owed by sellers"]
    assert (found.count, found.amount_uusd, found.oldest_at) == (1, 3, third.created_at)


def test_the_books_are_compared_on_demand_and_a_provider_that_is_away_is_said(op: Client, stripe: FakeStripe) -> None:
    assert "They agree" in op.post("/desk/ledger/books").content.decode()
    stripe.fail_next(*["500"] * 10)
    assert "were not compared" in op.post("/desk/ledger/books", follow=True).content.decode()


def test_a_transfer_is_found_by_what_it_refers_to_and_by_its_id(op: Client) -> None:
    buyer = organisation("buyer", 100)
    paid = deposit_of(buyer)
    for ref in (paid.ref, str(paid.pk)):
        assert f"?transfer={paid.pk}" in op.get("/desk/corrections", {"ref": ref}).content.decode()
    assert "No transfer refers to that" in op.get("/desk/corrections", {"ref": "lse_none"}).content.decode()


def test_one_operator_asks_another_decides_and_the_money_goes_back(op: Client, other: Client) -> None:
    buyer = organisation("buyer", 100)
    paid = deposit_of(buyer)
    assert op.post("/desk/corrections/ask", form(op, paid)).status_code == 302
    row = Correction.objects.get()
    decide = f"/desk/corrections/{row.pk}/decide"
    assert "Approve" not in op.get("/desk/corrections").content.decode()
    assert "does not decide it" in op.post(decide, {"decision": "approve"}, follow=True).content.decode()
    assert balance(buyer, AccountKind.BUYER_CASH) == 100 * USD
    assert "Approve" in other.get("/desk/corrections").content.decode()
    assert "Moved back: $5.000000" in other.post(decide, {"decision": "approve"}, follow=True).content.decode()
    assert balance(buyer, AccountKind.BUYER_CASH) == 95 * USD
    page = op.get("/desk/corrections").content.decode()
    assert "two@example.org" in page
    assert "Nothing waits to be decided" in page


def test_a_form_that_is_sent_twice_asks_once_and_for_something_else_not_at_all(op: Client) -> None:
    paid = deposit_of(organisation("buyer", 100))
    sent = form(op, paid)
    for _ in range(2):
        assert op.post("/desk/corrections/ask", sent).status_code == 302
    assert left_uusd(paid) == 95 * USD
    answer = op.post("/desk/corrections/ask", {**sent, "amount": "6"})
    assert answer.status_code == 409
    assert "used for another correction" in answer.content.decode()
    assert Correction.objects.count() == 1


@pytest.mark.parametrize(
    ("amount", "reason", "said"),
    [
        ("101", "why", "at most the $100.000000 that is not yet moved back"),
        ("0", "why", "More than nothing"),
        ("much", "why", "is not an amount of dollars"),
        ("5", "", "This field is required"),
    ],
)
def test_a_wish_that_cannot_be_met_comes_back_as_it_was_typed(op: Client, amount: str, reason: str, said: str) -> None:
    paid = deposit_of(organisation("buyer", 100))
    answer = op.post("/desk/corrections/ask", form(op, paid, amount, reason))
    assert answer.status_code == 422
    page = answer.content.decode()
    assert said in page
    assert f'value="{amount}"' in page
    assert not Correction.objects.exists()


def test_who_asked_may_take_it_back(op: Client) -> None:
    paid = deposit_of(organisation("buyer", 100))
    op.post("/desk/corrections/ask", form(op, paid))
    row = Correction.objects.get()
    assert (
        "Refused" in op.post(f"/desk/corrections/{row.pk}/decide", {"decision": "refuse"}, follow=True).content.decode()
    )
    assert Correction.objects.get().state == CorrectionState.REFUSED
    assert left_uusd(paid) == 100 * USD


def test_an_approval_that_the_ledger_refuses_moves_nothing_and_says_so(op: Client, other: Client) -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    paid = deposit_of(buyer)
    op.post("/desk/corrections/ask", form(op, paid, "100"))
    sold("lse_1", buyer, seller)
    row = Correction.objects.get()
    answer = other.post(f"/desk/corrections/{row.pk}/decide", {"decision": "approve"}, follow=True)
    assert "Nothing was moved" in answer.content.decode()
    assert Correction.objects.get().state == CorrectionState.ASKED
