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

#: Text with less contrast to what is behind it than WCAG 2.2 asks for (AA): the ratio, and the element.
CONTRAST = """
const rgb = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = colour => rgb(colour).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => { const c = getComputedStyle(element).backgroundColor;
  return c === 'rgba(0, 0, 0, 0)' && element.parentElement ? behind(element.parentElement) : c; };
return [...document.querySelectorAll('h1, h2, h3, p, th, td, dt, dd, li, a, code, strong, .mark, .verdict')].map(e => {
  const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
}).filter(([ratio]) => ratio < 4.5);
"""

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


def emulate(browser: Chrome, width: int, scheme: str) -> None:
    """Have pages drawn `width` pixels wide, as on a phone if that is narrow, in the scheme `light` or `dark`."""
    device = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def errors_logged(browser: Chrome) -> list[str]:
    """The errors on the browser's console since the last call."""
    log = browser.get_log("browser")  # type: ignore[no-untyped-call]  # Selenium has no types for it
    return [entry["message"] for entry in log if entry["level"] == "SEVERE"]
