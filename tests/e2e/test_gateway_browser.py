"""The gateway's page for people: on a wide screen, on a phone, in the dark, and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedctl_gateway import openapi
from tests.support.browser import CONTRAST, chromium, emulate, errors_logged
from tests.support.gateway import Running

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CALLS = sum(len(calls) for calls in openapi.document()["paths"].values())


@pytest.fixture
def driver() -> Iterator[Chrome]:
    with chromium("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as started:
        yield started


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_the_page_can_be_read(driver: Chrome, gateway: Running, width: int, scheme: str, tmp_path: Path) -> None:
    emulate(driver, width, scheme)
    driver.get(f"{gateway.url}/docs")
    driver.save_screenshot(str(tmp_path / f"{width}-{scheme}.png"))

    assert driver.execute_script("return document.querySelectorAll('section').length") == CALLS
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script(CONTRAST) == []
    driver.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width, "a schema scrolls in itself"
    assert driver.execute_script("return performance.getEntriesByType('resource').map(each => each.name)") == []
    assert [each for each in errors_logged(driver) if "favicon" not in each] == []
