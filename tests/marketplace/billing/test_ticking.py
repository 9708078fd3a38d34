"""The metering tick: what it charges is what one meter after the other would be charged."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, transaction
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from marketplace.accounts.models import Organisation
from marketplace.billing.invariants import breaches
from marketplace.billing.ledger import Entry, account, balance_uusd, post, post_set
from marketplace.billing.models import AccountKind, Meter, Phase, Transfer, TransferKind
from marketplace.billing.selectors import metered_uusd
from marketplace.billing.services import ticking
from marketplace.billing.services.holds import cash, hold
from marketplace.billing.services.metering import close_meter, note_usage, observe_beat, open_meter, report_usage
from marketplace.billing.services.ticking import capture_due
from marketplace.core.errors import Conflict, InsufficientFunds, InvalidInput
from marketplace.core.ids import fact_id
from tests.marketplace.billing.sales import FEE_BPS, MINUTE, RATE, USD, at, balance, organisation

pytestmark = pytest.mark.django_db


def opened(
    ref: str,
    buyer: Organisation,
    seller: Organisation,
    *,
    minutes: int = 60,
    upstream: str | None = None,
    covered: int = 20,
    rate: int = RATE,
    gpus: int = 1,
) -> str:
    open_meter(
        ref,
        buyer=buyer,
        seller=seller,
        escrow=hold(ref, buyer, minutes * rate // 60 * gpus),
        refund=cash(buyer),
        rate_uusd_per_gpu_hour=rate,
        fee_bps=FEE_BPS,
        gpus=gpus,
        start_at=at(),
        end_at=at(minutes=minutes),
        upstream=upstream,
    )
    for minute in range(covered + 1):
        observe_beat(ref, at(minutes=minute))
    return ref


def charged(ref: str) -> int:
    return Meter.objects.get(pk=ref).charged_uusd


def test_what_was_counted_is_charged_with_the_tick_and_not_before() -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    refs = [opened(f"lse_{n}", buyer, seller) for n in range(3)]
    for minutes, ref in enumerate(refs, 1):
        note_usage(ref, 1, minutes * 60_000)
    assert [charged(ref) for ref in refs] == [0, 0, 0]
    assert metered_uusd(refs) == 6 * MINUTE
    assert capture_due(at(hours=1)) == 3
    assert [charged(ref) for ref in refs] == [MINUTE, 2 * MINUTE, 3 * MINUTE]
    assert metered_uusd(refs) == 6 * MINUTE
    assert balance(seller, AccountKind.SELLER_ACCRUED) == 6 * MINUTE * (10_000 - FEE_BPS) // 10_000
    assert capture_due(at(hours=1)) == 0


def test_a_closed_meter_is_charged_no_more() -> None:
    ref = opened("lse_1", organisation("buyer", 100), organisation("seller"))
    close_meter(ref)
    note_usage(ref, 1, 60_000)
    assert capture_due(at(hours=1)) == 0
    assert (charged(ref), metered_uusd([ref])) == (0, 0)


def test_what_was_sold_on_is_charged_all_the_way_up() -> None:
    buyer, second, seller = organisation("buyer", 100), organisation("second", 100), organisation("seller")
    above = opened("lse_1", buyer, seller)
    below = opened("lse_2", second, buyer, upstream=above)
    note_usage(below, 1, 10 * 60_000)
    assert capture_due(at(hours=1)) == 1
    assert (charged(above), charged(below)) == (10 * MINUTE, 10 * MINUTE)


@pytest.mark.parametrize(
    ("field", "epoch", "total"), [("epoch", -1, 0), ("gpu_ms_total", 0, -1), ("gpu_ms_total", 0, 2**53)]
)
def test_a_counter_that_is_none_is_refused_by_name(field: str, epoch: int, total: int) -> None:
    ref = opened("lse_1", organisation("buyer", 100), organisation("seller"), covered=0)
    with pytest.raises(InvalidInput) as caught:
        note_usage(ref, epoch, total)
    assert caught.value.fields[0].field == field


def test_one_meter_that_cannot_be_charged_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    refs = [opened(f"lse_{n}", buyer, seller) for n in range(5)]
    for ref in refs:
        note_usage(ref, 1, 60_000)
    # Somebody posted the third's next charge already, with another content.
    stray = Meter.objects.get(pk=refs[2])
    post([Entry(fact_id("capture", refs[2], 60_000), TransferKind.CORRECTION, cash(buyer), cash(seller), 1, "stray")])
    with caplog.at_level(logging.ERROR):
        assert capture_due(at(hours=1)) == 4
    assert "lse_2 cannot be charged" in caplog.text
    assert [charged(ref) for ref in refs] == [MINUTE, MINUTE, 0, MINUTE, MINUTE]
    stray.refresh_from_db()
    assert stray.billable_gpu_ms == 0


@pytest.mark.django_db(transaction=True)
def test_two_ticks_at_once_and_late_reports_charge_everything_once() -> None:
    buyer, seller = organisation("buyer", 900), organisation("seller")
    refs = [opened(f"lse_{n:02d}", buyer, seller, covered=40) for n in range(12)]

    def work(number: int) -> None:
        try:
            for minutes in (5, 20, 10, 40, 40):
                for ref in refs[number % 3 :: 2]:
                    note_usage(ref, 1, minutes * 60_000)
                capture_due(at(hours=1))
        finally:
            connection.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    capture_due(at(hours=1))
    assert [charged(ref) for ref in refs] == [40 * MINUTE] * 12
    assert breaches() == []


COUNTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 15 * 60_000)), max_size=12)


class AgainstOneByOne(TestCase):
    @settings(max_examples=25)
    @given(
        counts=COUNTS,
        covered=st.lists(st.integers(0, 10), min_size=4, max_size=4),
        rates=st.lists(st.integers(1, 90_000).map(lambda n: n * 60), min_size=4, max_size=4),
        gpus=st.lists(st.integers(1, 3), min_size=4, max_size=4),
        batch=st.integers(1, 4),
    )
    def test_a_tick_leaves_every_meter_and_balance_as_reports_one_by_one_do(
        self, counts: list[tuple[int, int, int]], covered: list[int], rates: list[int], gpus: list[int], batch: int
    ) -> None:
        def world(name: str) -> tuple[list[str], Organisation]:
            buyer, seller = organisation(f"buyer {name}", 5_000), organisation(f"seller {name}")
            refs = [
                opened(f"{name}{n}", buyer, seller, minutes=8, covered=covered[n], rate=rates[n], gpus=gpus[n])
                for n in range(4)
            ]
            return refs, seller

        ticked, seller = world("t")
        single, other = world("s")
        usual, ticking.BATCH = ticking.BATCH, batch
        try:
            for number, epoch, gpu_ms in counts:
                note_usage(ticked[number], epoch, gpu_ms)
                report_usage(single[number], epoch, gpu_ms)
            assert metered_uusd(ticked) == metered_uusd(single)
            capture_due(at(hours=1))
        finally:
            ticking.BATCH = usual
        figures = ("billable_gpu_ms", "charged_uusd", "fee_uusd")
        for one, two in zip(ticked, single, strict=True):
            assert Meter.objects.values_list(*figures).get(pk=one) == Meter.objects.values_list(*figures).get(pk=two)
        assert balance(seller, AccountKind.SELLER_ACCRUED) == balance(other, AccountKind.SELLER_ACCRUED)
        assert breaches() == []


def entries(buyer: Organisation, seller: Organisation, *amounts: int) -> list[Entry]:
    to = account(AccountKind.SELLER_ACCRUED, seller)
    return [
        Entry(fact_id("set", buyer.pk, n), TransferKind.CAPTURE, cash(buyer), to, amount, "set")
        for n, amount in enumerate(amounts)
    ]


def test_a_set_is_posted_once_and_what_is_new_of_it_with_it() -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    assert post_set(entries(buyer, seller, USD, 2 * USD)) == 2
    assert post_set(entries(buyer, seller, USD, 2 * USD, 3 * USD)) == 1
    assert post_set(entries(buyer, seller, USD)) == 0
    assert post_set([]) == 0
    assert (balance(buyer, AccountKind.BUYER_CASH), balance(seller, AccountKind.SELLER_ACCRUED)) == (94 * USD, 6 * USD)


def test_a_set_of_which_one_is_refused_is_refused_whole() -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    before = Transfer.objects.count()
    with pytest.raises(InsufficientFunds):
        post_set(entries(buyer, seller, USD, 100 * USD))
    post_set(entries(buyer, seller, USD))
    with pytest.raises(Conflict):
        post_set(entries(buyer, seller, 2 * USD, 3 * USD))
    with pytest.raises(InvalidInput):
        post_set(entries(buyer, seller, USD, 0))
    with pytest.raises(ValueError, match="one by one"):
        post_set([Entry(uuid4(), TransferKind.PAYOUT, cash(buyer), cash(seller), 1, phase=Phase.PENDING)])
    assert Transfer.objects.count() == before + 1
    assert balance_uusd(cash(buyer)) == 99 * USD


def test_a_set_is_refused_by_a_closed_account() -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    to = account(AccountKind.SELLER_ACCRUED, seller)
    with transaction.atomic():
        type(to).objects.filter(pk=to.pk).update(closed_at=at(hours=-1))
        with pytest.raises(IntegrityError, match="closed account"), transaction.atomic():
            post_set(entries(buyer, seller, USD))
        transaction.set_rollback(True)


def test_a_window_that_begins_within_a_millisecond_is_counted_as_in_the_program() -> None:
    buyer, seller = organisation("buyer", 100), organisation("seller")
    start, end = at(microseconds=900), at(minutes=1) + timedelta(microseconds=100)
    open_meter(
        "lse_1",
        buyer=buyer,
        seller=seller,
        escrow=hold("lse_1", buyer, 2 * MINUTE),
        refund=cash(buyer),
        rate_uusd_per_gpu_hour=RATE,
        fee_bps=FEE_BPS,
        gpus=1,
        start_at=start,
        end_at=end,
    )
    for second in range(-1, 62):
        observe_beat("lse_1", at(seconds=second))
    note_usage("lse_1", 1, 10**9)
    capture_due(at(hours=1))
    assert Meter.objects.get(pk="lse_1").billable_gpu_ms == 60_000
