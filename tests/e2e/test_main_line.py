"""The whole product as a person meets it: sign up, pay in, rent, submit a job by its form, watch it train, read the
statement; against the real stack, with real agents that train, and nothing in the browser's console."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import text_to_be_present_in_element, url_contains, url_matches

from marketplace.core.money import parse_usd
from marketplace.devstack.demo.story import PLANS, SELLER, Story
from marketplace.devstack.demo.voice import Voice
from marketplace.devstack.stack import Stack
from marketplace.devstack.state import StateDir
from tests.e2e.conftest import SCREENS, look_at, patience, press, use_screen

pytestmark = pytest.mark.prove

PASSWORD = "correct horse battery"
TYPE_INTO = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))"
TOKENS = 400_000


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """The stack, its catalogue, and a seller with two islands whose agents are heard."""
    env = {"ARCHIPELAGO_FLEET_SYNC_MS": "1000"}
    with Stack(StateDir(tmp_path / "state"), web_port=0, fragile=True, env=env) as stack:
        told = Story(stack, Voice(io.StringIO()), tmp_path / "agents")
        try:
            told.catalogue()
            told.sell(told.sign_up(SELLER, "Northern Islands"), PLANS[:2])
            yield told
        finally:
            told.close()


class Person:
    """Somebody at a browser."""

    def __init__(self, browser: Chrome, server_url: str) -> None:
        self.browser = browser
        self.server_url = server_url
        self.wait = patience(browser, 30)

    def go(self, path: str) -> None:
        self.browser.get(f"{self.server_url}{path}")

    def fill(self, **fields: str) -> None:
        for name, value in fields.items():
            self.browser.execute_script(TYPE_INTO, self.browser.find_element(By.NAME, name), value)

    def press(self, selector: str) -> None:
        press(self.browser, selector)

    def sees(self, selector: str, words: str, limit_s: float = 30) -> None:
        shown = text_to_be_present_in_element((By.CSS_SELECTOR, selector), words)
        patience(self.browser, limit_s).until(shown, f"{words!r} in {selector}")

    def text(self, selector: str) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, selector).text

    def figure(self, label: str) -> str:
        """The figure of the page below `label`."""
        found = self.browser.find_element(By.XPATH, f"//dl[@class='figures']//dt[.='{label}']/following-sibling::dd")
        return found.text.splitlines()[0]


def test_a_person_pays_rents_trains_and_reads_what_it_cost(story: Story, browser: Chrome) -> None:
    use_screen(browser, "wide")
    ada = Person(browser, story.server_url)
    sign_up(ada)
    top_up(ada, "25")
    rent_and_give_back(ada)
    job = submit(ada)
    watch(ada)
    spent_uusd = parse_usd(ada.figure("Spent"), "spent")
    assert 0 < spent_uusd <= 5_000_000

    ada.go("/money")
    ada.sees("#balances", "$0.00")
    patience(browser, 60).until(lambda _: held_nothing(ada), "what was held is given back")
    for column in ("Cash", "Held"):
        statement_adds_up(ada, column)
    story.manage("check_ledger")

    for screen in SCREENS:
        use_screen(browser, screen)
        for name, path in (("jobs", "/jobs"), ("job", job), ("new-job", "/jobs/new"), ("leases", "/leases")):
            ada.go(path)
            look_at(browser, screen, f"main-{name}")
    # The one refusal is what the form was made to get.
    severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in severe if "status of 422" not in message] == []


def sign_up(ada: Person) -> None:
    ada.go("/")
    ada.press(".hero .button")
    ada.wait.until(url_contains("/signup"))
    ada.fill(email="ada@example.org", password1=PASSWORD)
    ada.press("main button[type=submit]")
    ada.wait.until(url_contains("/organisation"))


def top_up(ada: Person, dollars: str) -> None:
    ada.go("/money")
    ada.fill(amount=dollars)
    ada.press("form.row .button")
    ada.wait.until(lambda browser: not browser.current_url.startswith(ada.server_url))
    ada.press("button[value=pay]")
    ada.sees("#top-up", "$25.00 to spend")


def rent_and_give_back(ada: Person) -> None:
    """A GPU for minutes, whose agent meters it, ended early; only what was delivered is paid."""
    ada.go("/market")
    ada.press("a[href$='/rent']")
    ada.wait.until(url_contains("/rent"))
    until = datetime.now(UTC) + timedelta(minutes=20)
    ada.fill(gpus="1", end_at=until.strftime("%Y-%m-%dT%H:%M"))
    ada.sees("#preview", "can be rented now")
    ada.press("#rent-form button")
    ada.wait.until(url_contains("/leases/"))
    ada.wait.until(lambda browser: re.search(r"[1-9][\d.]* GPU-s", ada.text("#lease")), "the agent's meter is heard")
    ada.press("details summary:not([aria-label])")
    ada.press("button.danger")
    ada.sees("#lease", "Ended")
    ada.sees("#lease", "Returned", 60)


def submit(ada: Person) -> str:
    """The form's call follows what is typed; a refused form keeps it."""
    ada.go("/jobs/new")
    ada.fill(name="first run", tokens=str(TOKENS), budget_usd="a lot", inner_steps="30")
    ada.sees("#call-curl", f'"tokens": {TOKENS}')
    ada.press("form.card button[type=submit]")
    ada.sees("main", "Nothing was submitted")
    assert ada.browser.find_element(By.NAME, "name").get_attribute("value") == "first run"
    ada.fill(budget_usd="5")
    ada.press("form.card button[type=submit]")
    ada.wait.until(url_matches(r"/jobs/job_\w+$"))
    return ada.browser.current_url.removeprefix(ada.server_url)


def watch(ada: Person) -> None:
    """It moves by itself: no reload between submission and success, and the curve is drawn."""
    ada.browser.execute_script("window.notReloaded = true")
    ada.sees("#live", "Running", 60)
    ada.sees("#live", "Succeeded", 150)
    assert ada.browser.execute_script("return window.notReloaded")
    assert ada.browser.find_elements(By.CSS_SELECTOR, ".uplot canvas")
    assert len(ada.browser.find_elements(By.CSS_SELECTOR, ".lane-train")) >= 4
    shown = re.search(r"([\d.]+)\s+bits per byte, from ([\d.]+)", ada.text("#live"))
    assert shown is not None
    assert float(shown[1]) < float(shown[2])


def held_nothing(ada: Person) -> bool:
    ada.browser.refresh()
    return ada.figure("Held") == "$0.00"


def statement_adds_up(ada: Person, column: str) -> None:
    """Opening and every line give closing, to the micro-dollar, in what is written on the page."""
    cells = ada.browser.find_elements(By.CSS_SELECTOR, f".statement td[data-label='{column}']")
    written = [Decimal(cell.text.replace("$", "").replace(",", "") or "0") for cell in cells]
    closing, *lines, opening = written
    assert len(lines) >= 4
    assert opening + sum(lines) == closing
