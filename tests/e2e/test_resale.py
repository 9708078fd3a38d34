"""A team pays in, bids, gets its GPUs, sells two nights of them on, and is paid out what was delivered."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import text_to_be_present_in_element, url_contains, url_matches

from marketplace.accounts.models import Organisation
from marketplace.billing.invariants import breaches
from marketplace.billing.models import Meter
from marketplace.billing.services.books import compare_books
from marketplace.billing.services.maturing import mature_earnings
from marketplace.billing.services.settling import settle_payments
from marketplace.billing.tasks import drain_inbox
from marketplace.core.clock import database_now, minute_start
from marketplace.fleet import hooks
from marketplace.fleet.models import Agent
from marketplace.trading.models import Lease, Order
from marketplace.trading.orders import Wanted
from marketplace.trading.services import place_order, sweep_leases
from tests.e2e.conftest import patience, press
from tests.e2e.test_money import stripe
from tests.e2e.test_renting import TYPE_INTO, buyer, sign_in
from tests.fakes.stripe import FakeStripe
from tests.marketplace.trading.market import funded, make_agent, make_island
from tests.marketplace.trading.test_selling import acting
from tests.servers import wait_until
from worker_agent.protocol import UsageRecord

__all__ = ["buyer", "stripe"]  # fixtures

pytestmark = [pytest.mark.prove, pytest.mark.django_db(transaction=True)]

NIGHT_H = 8


def test_a_team_pays_in_bids_sells_two_nights_on_and_is_paid_out(
    live_server: LiveServer,
    browser: Chrome,
    picture: Callable[[str], None],
    buyer: Organisation,
    stripe: FakeStripe,
    settings: Settings,
) -> None:
    settings.FIRST_PAYOUT_DAYS = -7  # by the clock of this machine the nights are still to come
    island = make_island(name="fjord-1", gpu_count=8)
    agent = make_agent(island)
    wait = patience(browser)
    sign_in(browser, live_server)

    def fill(name: str, value: str) -> None:
        browser.execute_script(TYPE_INTO, browser.find_element(By.NAME, name), value)

    # Pay in.
    browser.get(f"{live_server.url}/money")
    fill("amount", "2000")
    press(browser, "form[action='/money/top-ups'] button")
    wait.until(url_contains("/c/pay/"))
    press(browser, "button[value=pay]")
    wait.until(url_contains("back=paid"))
    wait_until(lambda: len(stripe.delivered) >= 2, limit_s=20, what="the provider has told of the payment")
    drain_inbox()
    wait.until(text_to_be_present_in_element((By.TAG_NAME, "main"), "Paid"))

    # Bid, and be filled.
    now = database_now()
    browser.get(f"{live_server.url}/orders/new")
    fill("gpus", "8")
    fill("end_at", (now + timedelta(hours=72)).strftime("%Y-%m-%dT%H:%M"))
    fill("limit", "2.40")
    wait.until(text_to_be_present_in_element((By.ID, "preview"), "fjord-1"))
    press(browser, "#order-form button[type=submit]")
    wait.until(url_matches(r"/orders/ord_\w+$"))
    wait.until(text_to_be_present_in_element((By.ID, "order"), "Filled"))
    lease = Lease.objects.get(organisation=buyer)

    # Two nights are more than the team needs.
    nights = [now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=hours) for hours in (6, 30)]
    for number, night in enumerate(nights):
        browser.get(f"{live_server.url}/leases/{lease.pk}")
        press(browser, f"a[href='/leases/{lease.pk}/sell']")
        wait.until(url_contains("/sell"))
        fill("price", "1.80")
        fill("start_at", night.strftime("%Y-%m-%dT%H:%M"))
        fill("end_at", (night + timedelta(hours=NIGHT_H)).strftime("%Y-%m-%dT%H:%M"))
        wait.until(text_to_be_present_in_element((By.ID, "preview"), "You earn"))
        if number == 0:
            picture("sell")
        press(browser, "#sale-form button[type=submit]")
        wait.until(url_matches(r"/orders/ord_\w+$"))
        wait.until(text_to_be_present_in_element((By.ID, "order"), "Standing"))
    picture("sale-stands")

    # Another buys both.
    other = funded("night owls", 1_000)
    for night in nights:
        bid_for(other, island.pk, night)
    browser.refresh()
    wait.until(text_to_be_present_in_element((By.ID, "order"), "Filled"))
    picture("sale-filled")
    browser.get(f"{live_server.url}/leases/{lease.pk}")
    wait.until(text_to_be_present_in_element((By.ID, "lease"), "sold on"))
    picture("lease-sold-on")

    # Three days pass, with everything delivered.
    bought = list(Lease.objects.filter(organisation=other).order_by("start_min"))
    pass_the_time(agent, lease, bought)
    settle_payments(database_now(), timedelta(0))
    mature_earnings(database_now() + timedelta(days=30))
    earned = sum(meter.charged_uusd - meter.fee_uusd for meter in Meter.objects.filter(seller=buyer))
    assert earned == 2 * NIGHT_H * 8 * 1_800_000 * 95 // 100

    # Be paid out.
    browser.get(f"{live_server.url}/money/payouts")
    picture("payouts-before")
    press(browser, "form[action='/money/payouts/set-up'] button")
    wait.until(url_contains("/setup/e/"))
    press(browser, "button[value=done]")
    wait.until(url_contains("/money/payouts?back=1"))
    press(browser, "form[action='/money/payouts/pay-out'] button")
    wait.until(text_to_be_present_in_element((By.TAG_NAME, "main"), "Paid out"))
    picture("payouts-paid")
    browser.get(f"{live_server.url}/money")
    picture("money-after-payout")

    assert [transfer["amount"] for transfer in stripe.transfers.values()] == [(earned - earned // 10) // 10_000]
    assert breaches() == []
    assert compare_books().on_their_way_uusd == 0
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def bid_for(other: Organisation, island_id: str, night: datetime) -> Order:
    wish = Wanted(
        gpus=8,
        island_id=island_id,
        start_at=night,
        end_at=night + timedelta(hours=NIGHT_H),
        limit_uusd_per_gpu_hour=1_800_000,
    )
    return place_order(acting(other), wish, database_now())


def pass_the_time(agent: Agent, lease: Lease, nights: list[Lease]) -> None:
    """A beat a minute, what the agent counted for each night when it is over, and the sweeps."""
    over = {night.end_min: night for night in nights}
    edges = {lease.end_min, *over, *(night.start_min for night in nights)}
    for minute in range(lease.start_min, lease.end_min + 1):
        now = minute_start(minute)
        hooks.observe_beat(agent, now)
        if minute in over:
            night = over[minute]
            gpu_ms = (night.end_min - night.start_min) * night.gpus * 60_000
            record = UsageRecord(seq=minute, assignment_id=night.pk, gpu_ms_total=gpu_ms, observed_at_ms=0)
            hooks.take_usage(agent, [record], now)
        if minute in edges:
            sweep_leases(now)
    for later in (3, 6):
        sweep_leases(minute_start(lease.end_min + later))
