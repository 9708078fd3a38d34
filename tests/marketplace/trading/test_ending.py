from __future__ import annotations

import pytest

from marketplace.accounts.models import AuditEvent, Organisation
from marketplace.billing.ledger import account, balance_uusd
from marketplace.billing.models import AccountKind, Meter, MeterState
from marketplace.billing.services.holds import escrow, hold
from marketplace.billing.services.metering import observe_beat, report_usage
from marketplace.core.errors import Conflict, NotFound
from marketplace.core.money import fee_uusd
from marketplace.fleet.models import Island
from marketplace.trading import selectors
from marketplace.trading.models import Contract, ContractKind, Lease, LeaseState, Position
from marketplace.trading.services import end_lease, lease_done, settle, sweep_leases
from tests.marketplace.trading.market import GPU_MINUTE, START_MIN, USD, at, cash_uusd, for_job, leased, make_island

pytestmark = pytest.mark.django_db


def served(lease: Lease, minutes: float, since: float = 0) -> None:
    """Seen twice a minute and counted in full."""
    for half in range(int(since * 2), int((since + minutes) * 2) + 1):
        observe_beat(lease.pk, at(half / 2))
    report_usage(lease.pk, 1, int(minutes * 60_000) * lease.gpus)


def test_ending_early_gives_back_the_minutes_not_begun_and_the_money_not_used(
    buyer: Organisation, island: Island
) -> None:
    lease = leased(buyer, island, gpus=2)
    served(lease, 10.5)
    lease = end_lease(lease.pk, reason="released", by="user:1", now=at(10.5))

    assert (lease.state, lease.end_reason, lease.ended_at) == (LeaseState.ENDED, "released", at(10.5))
    # The minute in progress stays sold.
    assert selectors.free_gpus(island, START_MIN + 10, START_MIN + 11) == 6
    assert selectors.free_gpus(island, START_MIN + 11, START_MIN + 60) == 8
    given_back = Contract.objects.get(lease=lease, kind=ContractKind.RELEASE)
    assert (given_back.start_min - START_MIN, given_back.end_min - START_MIN, given_back.lots) == (11, 60, 2)

    settle(lease.pk, at(12))
    used_uusd = 21 * GPU_MINUTE
    assert cash_uusd(buyer) == 1_000 * USD - used_uusd
    assert balance_uusd(escrow(lease.pk, buyer)) == 0
    earned = balance_uusd(account(AccountKind.SELLER_ACCRUED, island.organisation))
    assert earned == used_uusd - fee_uusd(used_uusd, lease.fee_bps)


def test_a_repeated_end_is_harmless(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island)
    first = end_lease(lease.pk, reason="released", by="user:1", now=at(10))
    again = end_lease(lease.pk, reason="island_lost", failed=True, by="scheduler", now=at(20))
    assert (again.state, again.end_reason, again.ended_at) == (first.state, first.end_reason, first.ended_at)
    assert Position.objects.count() == 4
    assert AuditEvent.objects.filter(object_id=lease.pk, action="lease.ended").count() == 1


def test_a_lease_cancelled_before_it_begins_costs_nothing_and_is_settled_at_once(
    buyer: Organisation, island: Island
) -> None:
    lease = leased(buyer, island, start=30, gpus=8)
    lease = end_lease(lease.pk, reason="cancelled", by="user:1", now=at(29.9))
    assert (lease.state, lease.settled_at, lease.settle_at) == (LeaseState.CANCELLED, at(29.9), None)
    assert cash_uusd(buyer) == 1_000 * USD
    assert selectors.free_gpus(island, START_MIN + 30, START_MIN + 60) == 8
    assert leased(buyer, island, gpus=8, start=30).pk != lease.pk


def test_a_failed_lease_says_so_and_is_billed_for_what_was_delivered(buyer: Organisation, island: Island) -> None:
    hold("job_1", buyer, 100 * USD)
    lease = for_job(buyer, island, "job_1", gpus=4)
    served(lease, 3)
    lease = end_lease(lease.pk, reason="island_lost", failed=True, by="scheduler", now=at(4.5))
    assert lease.state == LeaseState.FAILED
    settle(lease.pk, at(6.5))
    assert balance_uusd(escrow("job_1", buyer)) == 100 * USD - 12 * GPU_MINUTE


def test_time_alone_begins_ends_and_settles(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, start=5, end=10)

    def after(minutes: float) -> tuple[str, bool]:
        sweep_leases(at(minutes))
        lease.refresh_from_db()
        return lease.state, lease.settled_at is not None

    assert after(4.9) == (LeaseState.PENDING, False)
    assert after(5) == (LeaseState.ACTIVE, False)
    assert after(9.9) == (LeaseState.ACTIVE, False)
    assert after(10.1) == (LeaseState.ENDED, False)
    assert lease.ended_at == at(10)
    assert lease.end_reason == "window"
    assert not Contract.objects.filter(kind=ContractKind.RELEASE).exists()
    assert after(12.05) == (LeaseState.ENDED, False)
    assert after(12.1) == (LeaseState.ENDED, True)
    assert cash_uusd(buyer) == 1_000 * USD


def test_a_sweep_that_comes_very_late_does_all_of_it(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, start=5, end=10)
    swept = sweep_leases(at(500))
    assert (swept.begun, swept.ended, swept.settled) == (1, 1, 0)
    assert sweep_leases(at(502)).settled == 1
    lease.refresh_from_db()
    assert (lease.state, lease.ended_at) == (LeaseState.ENDED, at(10))
    assert sweep_leases(at(503)).settled == 0


def test_a_sweep_of_an_empty_market_costs_three_queries(django_assert_num_queries: object) -> None:
    with django_assert_num_queries(3):  # type: ignore[operator]
        sweep_leases(at(0))


def test_the_last_counter_counts_until_the_lease_is_settled_and_not_after(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island)
    served(lease, 5)
    end_lease(lease.pk, reason="released", by="user:1", now=at(6))
    observe_beat(lease.pk, at(6))
    report_usage(lease.pk, 1, 6 * 60_000)
    assert Meter.objects.get(pk=lease.pk).charged_uusd == 6 * GPU_MINUTE
    settle(lease.pk, at(8))
    report_usage(lease.pk, 1, 60 * 60_000)
    meter = Meter.objects.get(pk=lease.pk)
    assert (meter.state, meter.charged_uusd) == (MeterState.CLOSED, 6 * GPU_MINUTE)
    assert cash_uusd(buyer) == 1_000 * USD - 6 * GPU_MINUTE


def test_work_that_is_done_settles_at_once_and_again_changes_nothing(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island, gpus=2)
    served(lease, 5)
    for moment in (5.0, 5.5):
        done = lease_done(lease, at(moment))
        assert (done.state, done.settled_at) == (LeaseState.ENDED, at(5))
    assert cash_uusd(buyer) == 1_000 * USD - 10 * GPU_MINUTE


def test_a_lease_that_goes_on_is_not_settled(buyer: Organisation, island: Island) -> None:
    lease = leased(buyer, island)
    with pytest.raises(Conflict):
        settle(lease.pk, at(1))
    with pytest.raises(NotFound):
        settle("lse_nothing", at(1))


def test_minutes_given_back_are_sold_again(buyer: Organisation) -> None:
    island = make_island(gpu_count=1)
    for begin in range(3):
        lease = leased(buyer, island, now=begin * 10)
        end_lease(lease.pk, reason="released", by="user:1", now=at(begin * 10 + 9.5))
    assert Lease.objects.filter(state=LeaseState.ENDED).count() == 3
