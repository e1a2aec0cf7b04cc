"""Headless Chromium for tests that look at pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium(*arguments: str) -> Iterator[Chrome]:
    """Start a Chromium that keeps its console's messages. Without Chromium, the test is skipped; in CI it fails."""
    from selenium import webdriver

    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        reason = "there is no Chromium with its driver: `make browser` installs them, as root"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", *arguments):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # root may not have a sandbox; only our own pages are opened
    with webdriver.Chrome(options, service=webdriver.ChromeService(driver)) as started:
        yield started


def errors_logged(browser: Chrome) -> list[str]:
    """The errors on the browser's console since the last call."""
    log = browser.get_log("browser")  # type: ignore[no-untyped-call]  # Selenium has no types for it
    return [entry["message"] for entry in log if entry["level"] == "SEVERE"]
