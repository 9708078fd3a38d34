from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import Entry, account, balance_uusd, post
from marketplace.billing.models import AccountKind, LedgerAccount, Meter, Phase, Transfer, TransferKind
from marketplace.billing.services.holds import cash, deposit, escrow, hold, hold_from, release
from marketplace.billing.services.metering import close_meter, observe_beat, open_meter, report_usage
from marketplace.core.errors import Conflict, InsufficientFunds, InvalidInput
from marketplace.core.money import charge_uusd, fee_uusd

START = datetime(2026, 1, 1, tzinfo=UTC)
RATE = 2_500_020
USD = 1_000_000


def opened(name: str, gpus: int = 2) -> Meter:
    buyer = Organisation.objects.create(name=f"buyer {name}")
    seller = Organisation.objects.create(name=f"seller {name}")
    deposit(buyer, 20 * USD, f"pi_{name}")
    held = hold(f"lease:{name}", buyer, 10 * USD)
    return open_meter(
        name,
        buyer=buyer,
        seller=seller,
        escrow=held,
        refund=cash(buyer),
        rate_uusd_per_gpu_hour=RATE,
        fee_bps=1250,
        gpus=gpus,
        start_at=START,
        end_at=START + timedelta(hours=1),
    )


def covered(name: str, minutes: int) -> None:
    for minute in range(minutes + 1):
        observe_beat(name, START + timedelta(minutes=minute))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE billing_transfer SET amount_uusd = 1",
        "DELETE FROM billing_transfer",
        "UPDATE billing_ledgeraccount SET credits_posted_uusd = credits_posted_uusd + 1",
        "UPDATE billing_ledgeraccount SET kind = 'bank'",
        "INSERT INTO billing_ledgeraccount (kind, ref, currency, normal, debits_pending_uusd, debits_posted_uusd,"
        " credits_pending_uusd, credits_posted_uusd) VALUES ('bank', 'x', 'USD', 'D', 0, 5, 0, 0)",
        "INSERT INTO billing_transfer SELECT gen_random_uuid(), kind, phase, amount_uusd, journal_id, ref,"
        " effective_at, created_at, credit_id, debit_id, pending_id FROM billing_transfer",
    ],
)
def test_the_ledger_refuses_every_other_writer(statement: str) -> None:
    deposit(Organisation.objects.create(name="a"), USD, "pi_1")
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.django_db
def test_transfers_cannot_be_truncated() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_transfer ENABLE TRIGGER transfer_no_truncate")
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("TRUNCATE billing_transfer CASCADE")


@pytest.mark.django_db
def test_a_replay_counts_once_and_a_changed_replay_is_refused() -> None:
    buyer = Organisation.objects.create(name="a")
    deposit(buyer, USD, "pi_1")
    deposit(buyer, USD, "pi_1")
    assert balance_uusd(cash(buyer)) == USD
    with pytest.raises(Conflict):
        deposit(buyer, 2 * USD, "pi_1")
    assert balance_uusd(cash(buyer)) == USD


@pytest.mark.django_db
def test_a_hold_beyond_the_cash_is_refused_and_nothing_of_its_batch_is_posted() -> None:
    buyer = Organisation.objects.create(name="a")
    deposit(buyer, USD, "pi_1")
    entries = [
        Entry(uuid.uuid4(), TransferKind.HOLD, cash(buyer), escrow("job:1", buyer), amount_uusd)
        for amount_uusd in (USD, 1)
    ]
    with pytest.raises(InsufficientFunds):
        post(entries)
    assert Transfer.objects.count() == 1
    assert balance_uusd(cash(buyer)) == USD


@pytest.mark.django_db
def test_what_is_pending_cannot_be_spent_and_is_resolved_once() -> None:
    buyer = Organisation.objects.create(name="a")
    deposit(buyer, USD, "pi_1")
    out, bank = cash(buyer), account(AccountKind.BANK)
    pending = Entry(uuid.uuid4(), TransferKind.PAYOUT, out, bank, USD, phase=Phase.PENDING)
    post([pending])
    with pytest.raises(InsufficientFunds):
        hold("job:1", buyer, 1)
    post([Entry(uuid.uuid4(), TransferKind.PAYOUT, out, bank, USD, phase=Phase.VOID, pending=pending.id)])
    with pytest.raises(Conflict):
        post([Entry(uuid.uuid4(), TransferKind.PAYOUT, out, bank, USD, phase=Phase.CONFIRM, pending=pending.id)])
    assert LedgerAccount.objects.get(pk=out.pk).available_uusd == USD


@pytest.mark.django_db
def test_a_budget_is_held_split_captured_and_released_to_the_last_micro_dollar() -> None:
    buyer, seller = (Organisation.objects.create(name=name) for name in "ab")
    deposit(buyer, 20 * USD, "pi_1")
    budget = hold("job:1", buyer, 12 * USD)
    part = hold_from("lease:1", "job:1", buyer, 6 * USD)
    open_meter(
        "1",
        buyer=buyer,
        seller=seller,
        escrow=part,
        refund=budget,
        rate_uusd_per_gpu_hour=RATE,
        fee_bps=1250,
        gpus=2,
        start_at=START,
        end_at=START + timedelta(hours=1),
    )
    covered("1", 30)
    report_usage("1", 0, 1_234_567)
    close_meter("1")
    close_meter("1")
    release(budget, cash(buyer))
    charge = charge_uusd(RATE, 1_234_567)
    assert balance_uusd(cash(buyer)) == 20 * USD - charge
    assert balance_uusd(account(AccountKind.SELLER_ACCRUED, seller)) == charge - fee_uusd(charge, 1250)
    assert balance_uusd(part) == balance_uusd(budget) == 0
    call_command("check_ledger")


@pytest.mark.django_db
def test_silence_of_more_than_ninety_seconds_is_not_billed() -> None:
    opened("1")
    for second in (0, 90, 181, 200):
        observe_beat("1", START + timedelta(seconds=second))
    observe_beat("1", START + timedelta(seconds=100))
    assert report_usage("1", 0, 10**9).billable_gpu_ms == (90 + 19) * 1000 * 2


@pytest.mark.django_db
def test_replayed_and_backward_counters_are_counted_once_and_epochs_add_up() -> None:
    opened("1")
    covered("1", 30)
    for epoch, total in ((0, 5000), (0, 5000), (0, 3000), (1, 2000), (0, 5000)):
        meter = report_usage("1", epoch, total)
    assert meter.billable_gpu_ms == 7000


@pytest.mark.django_db
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 3_600_000), min_size=1, max_size=8))
def test_the_bill_does_not_depend_on_how_it_was_sliced(cuts: list[int]) -> None:
    name = uuid.uuid4().hex
    opened(name)
    covered(name, 30)
    for cut in cuts:
        meter = report_usage(name, 0, cut)
    assert meter.charged_uusd == charge_uusd(RATE, max(cuts))
    assert meter.fee_uusd == fee_uusd(meter.charged_uusd, 1250)


@pytest.mark.django_db(transaction=True)
def test_eight_writers_of_one_meter_bill_it_once() -> None:
    opened("1")
    covered("1", 30)

    def write(_: int) -> None:
        try:
            for total in range(100_000, 1_000_001, 300_000):
                report_usage("1", 0, total)
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert Meter.objects.get(pk="1").charged_uusd == charge_uusd(RATE, 1_000_000)


@pytest.mark.django_db
def test_a_meter_opened_again_is_the_same_one_and_never_on_other_terms() -> None:
    meter = opened("1")
    terms = {
        "buyer": meter.buyer,
        "seller": meter.seller,
        "escrow": meter.escrow,
        "refund": meter.refund,
        "fee_bps": meter.fee_bps,
        "gpus": meter.gpus,
        "start_at": meter.start_at,
        "end_at": meter.end_at,
    }
    assert open_meter("1", rate_uusd_per_gpu_hour=RATE, **terms) == meter
    with pytest.raises(Conflict):
        open_meter("1", rate_uusd_per_gpu_hour=RATE + 60, **terms)


@pytest.mark.django_db
@pytest.mark.parametrize("amount_uusd", [0, -1, 10**15 + 1])
def test_an_amount_that_is_no_amount_is_refused_by_name(amount_uusd: int) -> None:
    with pytest.raises(InvalidInput) as refusal:
        deposit(Organisation.objects.create(name="a"), amount_uusd, "pi_1")
    assert refusal.value.fields[0].field == "amount_uusd"
