"""Balances and statements of a buyer, a seller and one who is both."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marketplace.accounts.models import Organisation
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.selectors import Balances, Statement, balances, statement
from marketplace.billing.services.holds import cash, deposit, hold, hold_from, release
from marketplace.billing.services.metering import close_meter, observe_beat, open_meter, report_usage
from marketplace.core.clock import database_now

USD = 1_000_000


def adds_up(found: Statement) -> bool:
    total = Balances(**dict(found.opening.items()))
    for line in found.lines:
        for name, amount in line.moved.items():
            total.add(name, amount)
    return total == found.closing


@pytest.mark.django_db
def test_a_statement_adds_up_whatever_its_period() -> None:
    buyer = Organisation.objects.create(name="a")
    before = database_now()
    deposit(buyer, 10 * USD, "pi_1")
    between = database_now()
    held = hold("job:1", buyer, 3 * USD)
    release(held, cash(buyer))
    hold("job:2", buyer, 2 * USD)
    after = database_now() + timedelta(seconds=1)
    for since, until in ((before, after), (before, between), (between, after)):
        assert adds_up(statement(buyer, since, until))
    closing = statement(buyer, between, after).closing
    assert closing == balances(buyer) == Balances(cash_uusd=8 * USD, held_uusd=2 * USD)
    assert closing.cash_uusd == balance_uusd(cash(buyer))


@pytest.mark.django_db
def test_a_statement_shows_nothing_of_others() -> None:
    buyer, other = (Organisation.objects.create(name=name) for name in "ab")
    deposit(buyer, USD, "pi_1")
    found = statement(other, database_now() - timedelta(days=1), database_now())
    assert (found.lines, found.closing, balances(other)) == ((), Balances(), Balances())


def use_for_an_hour(buyer: Organisation, seller: Organisation, ref: str, gpu_ms: list[int]) -> None:
    """A lease of one GPU for two dollars an hour, of which the agent counts `gpu_ms`, report by report."""
    now = database_now()
    held = hold(ref, buyer, 2 * USD)
    open_meter(
        ref,
        buyer=buyer,
        seller=seller,
        escrow=held,
        refund=cash(buyer),
        rate_uusd_per_gpu_hour=2 * USD - 2 * USD % 60,
        fee_bps=500,
        gpus=1,
        start_at=now,
        end_at=now + timedelta(minutes=59),
    )
    for step in range(60):
        observe_beat(ref, now + timedelta(minutes=step))
    for total in gpu_ms:
        report_usage(ref, 0, total)


@pytest.mark.django_db
def test_usage_is_one_line_a_day_for_each_side_and_the_fee_is_named() -> None:
    buyer, seller = (Organisation.objects.create(name=name) for name in "ab")
    since = database_now()
    deposit(buyer, 10 * USD, "pi_1")
    use_for_an_hour(buyer, seller, "lse_1", [60_000, 600_000, 1_800_000])
    until = database_now() + timedelta(seconds=1)

    paid = statement(buyer, since, until)
    usage = [line for line in paid.lines if line.what == "Usage"]
    charged = sum(-line.moved.held_uusd for line in usage)
    assert [line.ref for line in usage] in (["lse_1"], ["lse_1", "lse_1"])  # two where midnight fell between
    assert (charged, [line.fee_uusd for line in usage]) == (999_990, [None] * len(usage))

    got = statement(seller, since, until)
    assert {line.what for line in got.lines} == {"Earned"}
    earned, fee = got.closing.earned_uusd, sum(line.fee_uusd or 0 for line in got.lines)
    assert (earned + fee, fee) == (charged, charged * 500 // 10_000)
    assert adds_up(paid)
    assert adds_up(got)


@pytest.mark.django_db
def test_who_rents_from_themselves_sees_both_sides() -> None:
    both = Organisation.objects.create(name="a")
    since = database_now()
    deposit(both, 10 * USD, "pi_1")
    use_for_an_hour(both, both, "lse_1", [3_000_000])
    close_meter("lse_1")
    found = statement(both, since, database_now() + timedelta(seconds=1))
    assert {line.what for line in found.lines} == {"Top-up", "Hold", "Usage", "Earned", "Release"}
    assert adds_up(found)
    assert found.closing == balances(both)


MOVES = st.lists(
    st.tuples(st.sampled_from(["deposit", "hold", "part", "release"]), st.integers(1, 5 * USD)), min_size=1, max_size=12
)


@pytest.mark.django_db
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=MOVES, cut=st.integers(0, 12))
def test_whatever_moved_and_wherever_it_is_cut_two_halves_make_the_whole(
    moves: list[tuple[str, int]], cut: int, request: pytest.FixtureRequest
) -> None:
    buyer = Organisation.objects.create(name="a")
    since = middle = database_now()
    deposit(buyer, 100 * USD, f"pi_{buyer.pk}")
    held, part = hold(f"job:{buyer.pk}", buyer, 30 * USD), None
    for step, (what, amount_uusd) in enumerate(moves):
        if step == cut:
            middle = database_now()
        if what == "deposit":
            deposit(buyer, amount_uusd, f"pi_{buyer.pk}_{step}")
        elif what == "hold" and balances(buyer).cash_uusd >= amount_uusd:
            hold(held.ref, buyer, amount_uusd, tranche=step + 1)
        elif what == "part" and balance_uusd(held) >= amount_uusd:
            part = hold_from(f"lse:{buyer.pk}", held.ref, buyer, amount_uusd, tranche=step)
        elif what == "release":
            release(part or held, cash(buyer))
    until = database_now() + timedelta(seconds=1)
    whole, first, second = (statement(buyer, *each) for each in ((since, until), (since, middle), (middle, until)))
    assert all(map(adds_up, (whole, first, second)))
    assert (first.opening, first.closing, second.closing) == (whole.opening, second.opening, whole.closing)
    assert whole.closing == balances(buyer)
