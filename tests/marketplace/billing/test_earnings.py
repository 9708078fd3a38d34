"""From earned to payable, and back to the buyer: maturity, the reserve, refunds, freezes."""

from __future__ import annotations

from datetime import datetime

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marketplace.accounts.models import Organisation
from marketplace.billing.models import AccountKind, Meter, Transfer, TransferKind
from marketplace.billing.services.freezing import freeze, thaw
from marketplace.billing.services.holds import hold
from marketplace.billing.services.maturing import mature_earnings, release_reserves
from marketplace.billing.services.refunds import goodwill, refund
from marketplace.core.errors import Conflict, InvalidInput
from tests.marketplace.billing.sales import MINUTE, USD, at, balance, organisation, sold

CHARGED = 60 * MINUTE
EARNED = CHARGED * 95 // 100
KEPT = EARNED // 10

pytestmark = pytest.mark.django_db


@pytest.fixture
def seller(db: None) -> Organisation:
    return organisation("seller")


@pytest.fixture
def buyer(db: None) -> Organisation:
    return organisation("buyer", 100)


def given_back(lease: str, amount_uusd: int, incident: str = "inc_1", now: datetime | None = None) -> None:
    refund(incident, lease, amount_uusd, reason="the GPUs were slow", by="operator:1", now=now or at(hours=2))


def test_what_was_earned_becomes_payable_after_the_dispute_window_and_not_before(
    buyer: Organisation, seller: Organisation
) -> None:
    sold("lse_1", buyer, seller)
    assert mature_earnings(at(hours=72)) == 0
    assert balance(seller, AccountKind.SELLER_ACCRUED) == EARNED

    assert mature_earnings(at(hours=74)) == 1
    assert mature_earnings(at(hours=75)) == 0

    assert balance(seller, AccountKind.SELLER_ACCRUED) == 0
    assert balance(seller, AccountKind.SELLER_PAYABLE) == EARNED - KEPT
    assert balance(seller, AccountKind.SELLER_RESERVE) == KEPT


def test_the_reserve_of_a_new_seller_becomes_payable_once_it_was_kept_long_enough(
    buyer: Organisation, seller: Organisation
) -> None:
    sold("lse_1", buyer, seller)
    mature_earnings(at(days=4))
    assert release_reserves(at(days=33)) == 0
    assert release_reserves(at(days=35)) == 1
    assert release_reserves(at(days=36)) == 0
    assert balance(seller, AccountKind.SELLER_PAYABLE) == EARNED
    assert balance(seller, AccountKind.SELLER_RESERVE) == 0


def test_nothing_is_kept_of_a_seller_who_is_known(buyer: Organisation, seller: Organisation) -> None:
    sold("lse_1", buyer, seller)
    sold("lse_2", buyer, seller, start=at(days=40))
    mature_earnings(at(days=50))
    assert balance(seller, AccountKind.SELLER_RESERVE) == 0
    assert balance(seller, AccountKind.SELLER_PAYABLE) == 2 * EARNED


def test_a_freeze_of_either_side_stops_the_money_until_it_is_lifted(buyer: Organisation, seller: Organisation) -> None:
    sold("lse_1", buyer, seller)
    for who in (seller, buyer):
        freeze(who, reason="a dispute", ref="dp_1", by="system", now=at(hours=3))
        freeze(who, reason="a dispute", ref="dp_1", by="system", now=at(hours=3))
        assert mature_earnings(at(hours=80)) == 0
        thaw(who, ref="dp_1", by="system", now=at(hours=81))
    assert mature_earnings(at(hours=82)) == 1


def test_who_is_frozen_holds_no_more_money(buyer: Organisation) -> None:
    freeze(buyer, reason="a dispute", ref="dp_1", by="system", now=at())
    with pytest.raises(Conflict) as refused:
        hold("lse_9", buyer, USD)
    assert refused.value.code == "frozen"


def test_a_refund_comes_out_of_what_is_not_payable_yet_and_the_fee_gives_its_part(
    buyer: Organisation, seller: Organisation
) -> None:
    sold("lse_1", buyer, seller)
    before = balance(buyer, AccountKind.BUYER_CASH)
    for _ in range(2):
        given_back("lse_1", CHARGED // 2)
    assert balance(buyer, AccountKind.BUYER_CASH) == before + CHARGED // 2
    assert balance(seller, AccountKind.SELLER_ACCRUED) == EARNED // 2
    meter = Meter.objects.get(pk="lse_1")
    assert (meter.refunded_uusd, meter.fee_refunded_uusd) == (CHARGED // 2, CHARGED // 40)
    mature_earnings(at(days=5))
    assert balance(seller, AccountKind.SELLER_ACCRUED) == 0


def test_a_refund_that_comes_late_is_taken_from_the_reserve_and_then_owed_and_set_off(
    buyer: Organisation, seller: Organisation
) -> None:
    sold("lse_1", buyer, seller)
    mature_earnings(at(days=5))
    given_back("lse_1", CHARGED, now=at(days=6))
    assert balance(seller, AccountKind.SELLER_RESERVE) == 0
    assert balance(seller, AccountKind.SELLER_RECEIVABLE) == EARNED - KEPT

    sold("lse_2", buyer, seller, minutes=120, start=at(days=7))
    payable = balance(seller, AccountKind.SELLER_PAYABLE)
    mature_earnings(at(days=12))
    assert balance(seller, AccountKind.SELLER_RECEIVABLE) == 0
    grown = 2 * EARNED - 2 * EARNED // 10
    assert balance(seller, AccountKind.SELLER_PAYABLE) == payable + grown - (EARNED - KEPT)


def test_no_lease_gives_back_more_than_it_took_nor_an_incident_twice_with_another_amount(
    buyer: Organisation, seller: Organisation
) -> None:
    sold("lse_1", buyer, seller)
    given_back("lse_1", CHARGED - 1)
    with pytest.raises(InvalidInput) as refused:
        given_back("lse_1", 2, incident="inc_2")
    assert refused.value.fields[0].field == "amount_uusd"
    with pytest.raises(Conflict):
        given_back("lse_1", CHARGED - 2)


def test_goodwill_is_our_money_and_is_given_once(buyer: Organisation, seller: Organisation) -> None:
    sold("lse_1", buyer, seller)
    before = balance(buyer, AccountKind.BUYER_CASH)
    for _ in range(2):
        goodwill("inc_1", "lse_1", USD, reason="we were down", by="operator:1", now=at(hours=2))
    assert balance(buyer, AccountKind.BUYER_CASH) == before + USD
    assert balance(seller, AccountKind.SELLER_ACCRUED) == EARNED


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, CHARGED // 3), min_size=1, max_size=6), when=st.sampled_from([1, 100, 900]))
def test_however_a_refund_is_cut_its_parts_sum_to_the_same(cuts: list[int], when: int) -> None:
    with transaction.atomic():
        buyer, seller = organisation("b", 100), organisation("s")
        sold("lse_x", buyer, seller)
        total = 0
        for number, cut in enumerate(cuts):
            if total + cut > CHARGED:
                break
            given_back("lse_x", cut, f"inc_{number}", at(hours=when))
            mature_earnings(at(hours=when))
            total += cut
        meter = Meter.objects.get(pk="lse_x")
        assert meter.fee_refunded_uusd == meter.fee_uusd - (CHARGED - total) * 500 // 10_000
        moved = Transfer.objects.filter(ref="lse_x", kind__in=[TransferKind.SELLER_REFUND, TransferKind.FEE_REFUND])
        assert sum(moved.values_list("amount_uusd", flat=True)) == total
        transaction.set_rollback(True)
