"""Two operators at the desk: one sees what is kept from the catalogue, has the ledger audited and asks for a
correction, the other decides it. On a wide and a narrow screen, with nothing in the browser's console."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from django.core.management import call_command
from pytest_django.live_server_helper import LiveServer
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import text_to_be_present_in_element, url_contains

from marketplace.accounts.models import Organisation, User
from marketplace.accounts.services import ensure_organisation
from marketplace.billing.invariants import breaches
from marketplace.billing.ledger import balance_uusd
from marketplace.billing.services.holds import cash, deposit, hold
from marketplace.catalog.feeds.local_file import LocalFile
from marketplace.catalog.feeds.vast import VastFeed
from marketplace.catalog.services import refresh
from tests.e2e.conftest import patience, press

pytestmark = [pytest.mark.prove, pytest.mark.django_db(transaction=True)]

PASSWORD = "correct horse battery"
OPERATORS = ("grace@example.org", "barbara@example.org")
LISTS = """provider,gpu_name,vram_gib,link,gpus,usd_per_gpu_hour
North Barn,Zeta 9000,,,8,1.00
North Barn,H100 SXM,80,SXM,8,0
North Barn,H100 SXM,80,SXM,4,0.09
"""


def fill(folder: Path) -> Organisation:
    """A catalogue with some that nobody should believe, and a buyer who paid twice."""
    call_command("load_catalogue")
    path = folder / "list.csv"
    path.write_text(LISTS)
    now = datetime.now(UTC)
    refresh(LocalFile(path), now)
    refresh(VastFeed("key", "http://127.0.0.1:1"), now)
    buyer = Organisation.objects.create(name="Aurora Labs")
    for payment in ("pi_3TbA9", "pi_3TbB0"):
        deposit(buyer, 250_000_000, payment)
    hold(f"job_{'0' * 26}", buyer, 120_000_000)
    return buyer


def sign_in(browser: Chrome, server: str, email: str, towards: str) -> None:
    browser.get(f"{server}/accounts/login/?next={towards}")
    browser.find_element(By.NAME, "login").send_keys(email)
    browser.find_element(By.NAME, "password").send_keys(PASSWORD)
    press(browser, "main button[type=submit]")
    patience(browser).until(url_contains(towards))


def test_two_operators_keep_the_market_honest(
    live_server: LiveServer, browser: Chrome, picture: Callable[[str], None], tmp_path: Path
) -> None:
    for email in OPERATORS:
        ensure_organisation(User.objects.create_user(email, PASSWORD, is_staff=True))
    buyer = fill(tmp_path)
    wait, main = patience(browser), (By.ID, "main")
    sign_in(browser, live_server.url, OPERATORS[0], "/desk/quarantine")
    wait.until(text_to_be_present_in_element(main, "Zeta 9000"))
    picture("desk-catalogue")

    browser.find_element(By.LINK_TEXT, "Ledger").click()
    wait.until(text_to_be_present_in_element(main, "not looked at yet"))
    press(browser, "form[action$='/audit'] button")
    wait.until(text_to_be_present_in_element(main, "all hold"))
    picture("desk-ledger")

    browser.find_element(By.LINK_TEXT, "Corrections").click()
    wait.until(url_contains("/desk/corrections"))
    browser.find_element(By.ID, "ref").send_keys("pi_3TbB0")
    press(browser, "form[method=get] button")
    wait.until(text_to_be_present_in_element(main, "Aurora Labs"))
    picture("desk-transfers")
    press(browser, "td.end a")
    wait.until(text_to_be_present_in_element(main, "Not yet moved back"))
    browser.find_element(By.NAME, "reason").send_keys("Paid twice, the card was charged once")
    picture("desk-ask")
    press(browser, "form[action$='/ask'] button[type=submit]")
    wait.until(text_to_be_present_in_element(main, "Another operator decides it"))
    assert "Approve" not in browser.find_element(*main).text

    browser.delete_all_cookies()
    sign_in(browser, live_server.url, OPERATORS[1], "/desk/corrections")
    wait.until(text_to_be_present_in_element(main, OPERATORS[0]))
    picture("desk-decide")
    press(browser, "button[value=approve]")
    wait.until(text_to_be_present_in_element(main, "Moved back: $250.000000"))
    picture("desk-decided")
    assert balance_uusd(cash(buyer)) == 130_000_000
    assert breaches() == []
    assert browser.get_log("browser") == []
