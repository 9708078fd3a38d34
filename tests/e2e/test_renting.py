"""A person finds an island on the market, sees what a lease would cost as they type, rents, extends and ends it; on a
wide and a narrow screen, with nothing in the browser's console."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.conf import settings
from django.test import Client
from pytest_django.live_server_helper import LiveServer
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import text_to_be_present_in_element, url_contains

from marketplace.accounts.models import Organisation, User
from marketplace.accounts.services import ensure_organisation
from marketplace.billing.services.holds import deposit
from marketplace.core.clock import database_now
from marketplace.fleet import hooks
from marketplace.fleet.models import Agent
from marketplace.trading.models import Lease
from marketplace.trading.services import sweep_leases
from tests.e2e.conftest import patience, press
from tests.marketplace.trading.market import USD, charge_counted, make_agent, make_island

pytestmark = [pytest.mark.prove, pytest.mark.django_db(transaction=True)]

TYPE_INTO = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"


@pytest.fixture
def buyer() -> Organisation:
    user = User.objects.create_user("ada@example.org", "correct horse battery")
    organisation = ensure_organisation(user)
    deposit(organisation, 100 * USD, "pi_ada")
    return organisation


def sign_in(browser: Chrome, live_server: LiveServer) -> None:
    """With a session of the server's own; signing in by its form is another test's."""
    client = Client()
    client.force_login(User.objects.get(), backend="allauth.account.auth_backends.AuthenticationBackend")
    browser.get(f"{live_server.url}/accounts/login/")
    browser.add_cookie(
        {"name": settings.SESSION_COOKIE_NAME, "value": client.cookies[settings.SESSION_COOKIE_NAME].value}
    )


def deliver(agent: Agent, lease: Lease, minutes: int) -> None:
    """The agent is seen and counts, up to `minutes` after the lease began, and the tick charges it."""
    for half in range(2 * minutes + 1):
        hooks.observe_beat(agent, lease.created_at + timedelta(seconds=30 * half))
    charge_counted(agent, lease, minutes * 60_000 * lease.gpus, database_now())


def test_a_person_rents_watches_extends_and_ends(
    live_server: LiveServer, browser: Chrome, picture: Callable[[str], None], buyer: Organisation
) -> None:
    island = make_island(name="fjord-1", wan_up_mbps=200, wan_down_mbps=900)
    make_island(
        name="reef-2", simulated=True, gpu_count=16, gpus_per_lot=8, preemptible=True, price_uusd_per_gpu_hour=60_000
    )
    agent = make_agent(island)
    wait = patience(browser)
    sign_in(browser, live_server)
    browser.get(f"{live_server.url}/leases")
    picture("leases-none")
    browser.get(f"{live_server.url}/market")
    picture("market")
    press(browser, f"a[href='/islands/{island.pk}/rent']")
    wait.until(url_contains("/rent"))
    picture("rent")

    gpus = browser.find_element(By.NAME, "gpus")
    browser.execute_script(TYPE_INTO, gpus, "9")
    wait.until(text_to_be_present_in_element((By.ID, "preview"), "the island has 8"))
    picture("rent-refused")
    browser.execute_script(TYPE_INTO, gpus, "4")
    wait.until(text_to_be_present_in_element((By.ID, "preview"), "can be rented now"))
    picture("rent-preview")
    press(browser, "#rent-form button")
    wait.until(url_contains("/leases/"))
    picture("lease")

    lease = Lease.objects.get()
    deliver(agent, lease, 12)
    wait.until(text_to_be_present_in_element((By.ID, "lease"), "48.0 GPU-min"))
    later = (database_now() + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M")
    browser.execute_script(TYPE_INTO, browser.find_element(By.NAME, "end_at"), later)
    press(browser, "form[action$='/extend'] button")
    wait.until(text_to_be_present_in_element((By.ID, "main"), "Extended until"))
    picture("lease-extended")

    press(browser, "details summary:not([aria-label])")
    picture("lease-confirm")
    press(browser, "button.danger")
    wait.until(text_to_be_present_in_element((By.ID, "lease"), "Ended"))
    sweep_leases(database_now() + timedelta(minutes=3))
    wait.until(text_to_be_present_in_element((By.ID, "lease"), "Returned"))
    picture("lease-ended")
    browser.get(f"{live_server.url}/leases")
    picture("leases")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
