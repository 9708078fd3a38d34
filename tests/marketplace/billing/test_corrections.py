"""Corrections: two people, the reverse of what was posted, and never more than it."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, transaction

from marketplace.accounts.models import Organisation
from marketplace.billing.models import AccountKind, Correction, CorrectionState, Transfer, TransferKind
from marketplace.billing.services.corrections import approve_correction, ask_correction, refuse_correction
from marketplace.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from tests.marketplace.billing.sales import USD, at, balance, organisation, sold

pytestmark = pytest.mark.django_db


@pytest.fixture
def buyer(db: None) -> Organisation:
    return organisation("buyer", 100)


def deposit_of(buyer: Organisation) -> Transfer:
    return Transfer.objects.get(kind=TransferKind.DEPOSIT, credit__organisation=buyer)


def asked(original: Transfer, amount_uusd: int = USD, by: str = "operator:1") -> Correction:
    return ask_correction(original.pk, amount_uusd, reason="paid twice", by=by, now=at(hours=1))


def test_what_one_asks_and_another_approves_is_moved_back(buyer: Organisation) -> None:
    row = asked(deposit_of(buyer))
    assert balance(buyer, AccountKind.BUYER_CASH) == 100 * USD
    done = approve_correction(row.pk, by="operator:2", now=at(hours=2))
    assert done.state == CorrectionState.POSTED
    assert balance(buyer, AccountKind.BUYER_CASH) == 99 * USD
    with pytest.raises(Conflict):
        approve_correction(row.pk, by="operator:3", now=at(hours=3))


def test_nobody_approves_what_they_asked_for(buyer: Organisation) -> None:
    row = asked(deposit_of(buyer))
    with pytest.raises(Forbidden):
        approve_correction(row.pk, by="operator:1", now=at(hours=2))
    with pytest.raises(IntegrityError), transaction.atomic():
        Correction.objects.filter(pk=row.pk).update(
            state=CorrectionState.POSTED, decided_by="operator:1", decided_at=at(hours=2)
        )


def test_what_is_refused_moves_nothing_and_can_be_asked_anew(buyer: Organisation) -> None:
    original = deposit_of(buyer)
    row = asked(original, 100 * USD)
    with pytest.raises(InvalidInput):
        asked(original, 1)
    refuse_correction(row.pk, by="operator:1", now=at(hours=2))
    assert balance(buyer, AccountKind.BUYER_CASH) == 100 * USD
    assert asked(original, 1).state == CorrectionState.ASKED


def test_a_charge_that_was_wrong_goes_back_to_the_cash_and_not_to_a_closed_escrow(buyer: Organisation) -> None:
    seller = organisation("seller")
    sold("lse_1", buyer, seller)
    captured = Transfer.objects.get(kind=TransferKind.CAPTURE)
    cash = balance(buyer, AccountKind.BUYER_CASH)
    row = asked(captured, captured.amount_uusd)
    approve_correction(row.pk, by="operator:2", now=at(hours=2))
    assert balance(buyer, AccountKind.BUYER_CASH) == cash + captured.amount_uusd
    assert balance(seller, AccountKind.SELLER_ACCRUED) == 0


def test_what_cannot_be_corrected_is_named(buyer: Organisation) -> None:
    row = asked(deposit_of(buyer))
    approve_correction(row.pk, by="operator:2", now=at(hours=2))
    posted = Transfer.objects.get(kind=TransferKind.CORRECTION)
    with pytest.raises(Conflict):
        asked(posted, 1)
    with pytest.raises(NotFound):
        ask_correction("nonsense", 1, reason="x", by="operator:1", now=at())
    with pytest.raises(InvalidInput) as no_reason:
        ask_correction(deposit_of(buyer).pk, 1, reason=" ", by="operator:1", now=at())
    assert no_reason.value.fields[0].field == "reason"
