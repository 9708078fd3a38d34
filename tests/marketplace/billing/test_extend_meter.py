from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.models import Meter
from marketplace.billing.services.holds import cash, deposit, escrow, hold
from marketplace.billing.services.metering import close_meter, extend_meter, observe_beat, open_meter, report_usage
from marketplace.core.errors import Conflict, InsufficientFunds, InvalidInput

pytestmark = pytest.mark.django_db

START = datetime(2026, 1, 1, tzinfo=UTC)
RATE = 3_600_000
HOUR_UUSD = RATE
USD = 1_000_000


@pytest.fixture
def buyer() -> Organisation:
    organisation = Organisation.objects.create(name="buyer")
    deposit(organisation, 20 * USD, "pi_1")
    return organisation


@pytest.fixture
def meter(buyer: Organisation) -> Meter:
    return open_meter(
        "lease",
        buyer=buyer,
        seller=Organisation.objects.create(name="seller"),
        escrow=hold("lease", buyer, HOUR_UUSD),
        refund=cash(buyer),
        rate_uusd_per_gpu_hour=RATE,
        fee_bps=500,
        gpus=1,
        start_at=START,
        end_at=START + timedelta(hours=1),
    )


def use(meter: Meter, minutes: int) -> None:
    for minute in range(minutes + 1):
        observe_beat(meter.pk, START + timedelta(minutes=minute))
    report_usage(meter.pk, 1, minutes * 60_000)


def test_what_is_used_in_the_longer_window_is_billed_and_the_rest_returns(buyer: Organisation, meter: Meter) -> None:
    hold("lease", buyer, HOUR_UUSD, 1)
    extend_meter(meter.pk, START + timedelta(hours=2))
    use(meter, 90)
    assert close_meter(meter.pk).charged_uusd == HOUR_UUSD * 3 // 2
    assert balance_uusd(cash(buyer)) == 20 * USD - HOUR_UUSD * 3 // 2


def test_what_was_charged_already_needs_no_second_cover(buyer: Organisation, meter: Meter) -> None:
    use(meter, 40)
    with pytest.raises(InsufficientFunds):
        extend_meter(meter.pk, START + timedelta(minutes=61))
    hold("lease", buyer, HOUR_UUSD // 60, 1)
    assert extend_meter(meter.pk, START + timedelta(minutes=61)).end_at == START + timedelta(minutes=61)


def test_a_refused_extension_leaves_the_meter_as_it_was(meter: Meter) -> None:
    with pytest.raises(InsufficientFunds):
        extend_meter(meter.pk, START + timedelta(hours=2))
    meter.refresh_from_db()
    assert meter.end_at == START + timedelta(hours=1)


def test_a_repeated_extension_is_harmless_and_a_shorter_one_refused(buyer: Organisation, meter: Meter) -> None:
    hold("lease", buyer, HOUR_UUSD, 1)
    for _ in range(2):
        extend_meter(meter.pk, START + timedelta(hours=2))
    assert balance_uusd(escrow("lease", buyer)) == 2 * HOUR_UUSD
    with pytest.raises(InvalidInput):
        extend_meter(meter.pk, START + timedelta(hours=1))


def test_a_closed_meter_is_not_opened_by_an_extension(buyer: Organisation, meter: Meter) -> None:
    close_meter(meter.pk)
    with pytest.raises(Conflict):
        extend_meter(meter.pk, START + timedelta(hours=2))
