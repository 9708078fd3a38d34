"""A person bids below the market, sees what it would do as they type, and watches it fill when the price falls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from pytest_django.live_server_helper import LiveServer
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import text_to_be_present_in_element, url_matches

from marketplace.accounts.models import Organisation
from marketplace.core.clock import database_now
from marketplace.fleet.models import Island
from marketplace.trading.services import sweep_orders
from tests.e2e.conftest import patience, press
from tests.e2e.test_renting import TYPE_INTO, buyer, sign_in
from tests.marketplace.trading.market import make_island

__all__ = ["buyer"]  # a fixture

pytestmark = [pytest.mark.prove, pytest.mark.django_db(transaction=True)]


def test_a_person_bids_waits_and_is_filled(
    live_server: LiveServer, browser: Chrome, picture: Callable[[str], None], buyer: Organisation
) -> None:
    make_island(name="fjord-1", gpu_count=2)
    make_island(name="reef-2", gpu_count=4, simulated=True)
    wait = patience(browser)
    sign_in(browser, live_server)
    browser.get(f"{live_server.url}/orders")
    picture("orders-none")
    browser.get(f"{live_server.url}/market")
    press(browser, "a[href='/orders/new']")
    wait.until(url_matches(r"/orders/new$"))
    picture("order-new")

    def fill(name: str, value: str) -> None:
        browser.execute_script(TYPE_INTO, browser.find_element(By.NAME, name), value)

    fill("gpus", "3")
    fill("end_at", (database_now() + timedelta(hours=3)).strftime("%Y-%m-%dT%H:%M"))
    fill("limit", "2.40")
    wait.until(text_to_be_present_in_element((By.ID, "preview"), "reef-2"))
    picture("order-preview")
    fill("limit", "1.20")
    wait.until(text_to_be_present_in_element((By.ID, "preview"), "it would wait for it"))
    picture("order-preview-waits")
    press(browser, "#order-form button[type=submit]")
    wait.until(url_matches(r"/orders/ord_\w+$"))
    picture("order-stands")

    Island.objects.filter(name="reef-2").update(price_uusd_per_gpu_hour=1_200_000)
    sweep_orders(database_now())
    wait.until(text_to_be_present_in_element((By.ID, "order"), "Filled"))
    wait.until(text_to_be_present_in_element((By.ID, "order"), "reef-2"))
    picture("order-filled")
    browser.get(f"{live_server.url}/orders")
    picture("orders")
    browser.get(f"{live_server.url}/leases")
    picture("leases-with-orders")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
