"""Pictures of the pages of a running demo, for the README: what a person signed in as the buyer sees.

Invariant: the pictures are of the real pages in a real browser; CHROMIUM and CHROMEDRIVER name its programs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WIDTH_PX = 1280
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-dev-shm-usage",
)


class NoBrowser(Exception):
    """There is no Chromium to take pictures with."""


class Pictures:
    """`folder` gets NAME.png for each `take`."""

    def __init__(self, folder: Path, server_url: str, email: str, password: str) -> None:
        self._folder = folder
        self._server_url = server_url
        self._email, self._password = email, password

    def take(self, name: str, path: str, *, height_px: int, shown: str) -> None:
        """The page at `path`, once the element `shown` (a CSS selector) is there."""
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import WebDriverWait

        self._folder.mkdir(parents=True, exist_ok=True)
        with self._browser() as browser:
            browser.get(f"{self._server_url}/accounts/login/")
            browser.find_element(By.NAME, "login").send_keys(self._email)
            browser.find_element(By.NAME, "password").send_keys(self._password)
            browser.find_element(By.CSS_SELECTOR, "main form button[type=submit]").click()
            WebDriverWait(browser, 20).until(lambda b: "/accounts/login" not in b.current_url)
            metrics = {"width": WIDTH_PX, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            browser.get(f"{self._server_url}{path}")
            WebDriverWait(browser, 20).until(lambda b: b.find_elements(By.CSS_SELECTOR, shown))
            browser.save_screenshot(str(self._folder / f"{name}.png"))

    @contextmanager
    def _browser(self) -> Iterator[Chrome]:
        try:
            from selenium.webdriver import Chrome, ChromeOptions
            from selenium.webdriver.chrome.service import Service
        except ImportError as error:
            raise NoBrowser("pictures need selenium, which `make venv` installs") from error
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
        if not chromium or not driver:
            raise NoBrowser("pictures need Chromium and chromedriver; CHROMIUM and CHROMEDRIVER name them")
        options = ChromeOptions()
        options.binary_location = chromium
        with TemporaryDirectory() as profile:
            for flag in (*FLAGS, f"--user-data-dir={profile}"):
                options.add_argument(flag)
            with Chrome(options=options, service=Service(driver)) as browser:
                yield browser
