"""A real browser. CHROMIUM and CHROMEDRIVER name the programs; without them these tests are skipped.

SCREENSHOTS names a folder that gets a picture of each page.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    """A browser with a profile of its own, whose console log is kept: a CSP violation is written there."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("CHROMIUM and CHROMEDRIVER name no browser")
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options=options, service=Service(driver)) as chrome:
        yield chrome


SCREENS = {"wide": (1280, 860), "narrow": (390, 844)}


@pytest.fixture(params=SCREENS)
def picture(request: pytest.FixtureRequest, browser: Chrome) -> Callable[[str], None]:
    """Look at the page as it is: kept as a picture where one is wanted, and held to the width of the screen."""
    use_screen(browser, request.param)
    return lambda name: look_at(browser, request.param, name)


def use_screen(browser: Chrome, screen: str, height: int | None = None) -> None:
    """Set the viewport and not the window, which a browser keeps wider than a phone."""
    width, usual = SCREENS[screen]
    metrics = {"width": width, "height": height or usual, "deviceScaleFactor": 1, "mobile": screen == "narrow"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def look_at(browser: Chrome, screen: str, name: str) -> None:
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        usual = SCREENS[screen][1]
        use_screen(browser, screen, max(usual, browser.execute_script("return document.body.scrollHeight")))
        browser.save_screenshot(str(Path(folder) / f"{screen}-{name}.png"))
        use_screen(browser, screen)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= SCREENS[screen][0], f"{name} scrolls sideways on a {screen} screen"


def press(browser: Chrome, selector: str) -> None:
    """Click it in the middle of the screen, where no bar lies over it. A live part may be swapped between finding and
    clicking; then it is found again."""

    def click(_: Chrome) -> bool:
        button = browser.find_element(By.CSS_SELECTOR, selector)
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
        return True

    patience(browser).until(click, f"{selector} can be pressed")


def patience(browser: Chrome, limit_s: float = 20) -> WebDriverWait[Chrome]:
    """To wait for what a page comes to show: one that is just being left or swapped, whatever the driver calls that, is
    looked at again."""
    return WebDriverWait(browser, limit_s, ignored_exceptions=(WebDriverException,))
