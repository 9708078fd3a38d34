"""A person signs up, sees their organisation, makes a key, and a program uses it over REST. On a wide and a narrow
screen, with the content security policy on and nothing in the browser's console."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from pytest_django.live_server_helper import LiveServer
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import url_contains, visibility_of_element_located
from selenium.webdriver.support.ui import Select

from tests.e2e.conftest import patience, press

pytestmark = [pytest.mark.prove, pytest.mark.django_db(transaction=True)]

PASSWORD = "correct horse battery"


def test_a_person_signs_up_and_a_program_uses_their_key(
    live_server: LiveServer, browser: Chrome, picture: Callable[[str], None]
) -> None:
    wait = patience(browser)
    browser.get(live_server.url)
    picture("landing")
    press(browser, ".hero .button")
    wait.until(url_contains("/signup"))
    picture("signup")
    browser.find_element(By.NAME, "email").send_keys("ada@example.org")
    browser.find_element(By.NAME, "password1").send_keys(PASSWORD)
    press(browser, "main button[type=submit]")

    wait.until(url_contains("/organisation"))
    assert browser.find_element(By.TAG_NAME, "h1").text == "ada"
    assert "ada@example.org" in browser.find_element(By.TAG_NAME, "main").text
    picture("organisation")

    browser.find_element(By.ID, "key-name").send_keys("nightly training")
    Select(browser.find_element(By.ID, "key-days")).select_by_value("30")
    press(browser, "#new-key-form button")
    wait.until(url_contains("/reauthenticate"))
    picture("reauthenticate")
    browser.find_element(By.NAME, "password").send_keys(PASSWORD)
    press(browser, "main button[type=submit]")
    secret = wait.until(visibility_of_element_located((By.ID, "new-key"))).text
    picture("new-key")

    answer = httpx.get(f"{live_server.url}/api/v1/me", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status_code == 200
    assert answer.json()["organisation"]["name"] == "ada"

    browser.get(f"{live_server.url}/organisation/")
    assert secret not in browser.page_source
    browser.get(f"{live_server.url}/accounts/email/")
    picture("email")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    browser.get(f"{live_server.url}/organisation/")
    picture("organisation-dark")
    complaints = [entry["message"] for entry in browser.get_log("browser") if entry["level"] in {"SEVERE", "WARNING"}]
    assert complaints == []
    assert browser.execute_script("return htmx.version") == "4.0.1"
    assert "script-src 'self'" in httpx.get(live_server.url).headers["Content-Security-Policy"]
