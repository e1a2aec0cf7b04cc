"""A report as people see it: on a wide screen, on a phone, in the dark, and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedctl_bench.report.files import write_report
from tests.support.bench_reports import sample_report
from tests.support.browser import CONTRAST, chromium, emulate, errors_logged

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[bench]'")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: Text that is cut off, or lies over other text, within each picture; and pictures whose letters are too small.
OVERLAPS = """
return [...document.querySelectorAll('figure svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  const out = words.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
    || box.top < frame.top - 1 || box.bottom > frame.bottom + 1).map(([word]) => 'cut off: ' + word);
  words.forEach(([one, a], i) => words.slice(i + 1).forEach(([two, b]) => {
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3) out.push(`overlap: ${one} and ${two}`);
  }));
  const scale = frame.width / svg.viewBox.baseVal.width;
  [...svg.querySelectorAll('text')].filter(text => parseFloat(getComputedStyle(text).fontSize) * scale < 7.5)
    .forEach(text => out.push('too small: ' + text.textContent));
  return out;
});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sample_report(), tmp_path_factory.mktemp("report"))[0]


@pytest.fixture
def driver() -> Iterator[Chrome]:
    with chromium("--host-resolver-rules=MAP * ~NOTFOUND") as started:
        yield started


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_a_report_can_be_read(driver: Chrome, page: Path, width: int, scheme: str, tmp_path: Path) -> None:
    emulate(driver, width, scheme)
    driver.get(page.as_uri())
    driver.save_screenshot(str(tmp_path / f"{width}-{scheme}.png"))

    assert driver.execute_script("return document.documentElement.scrollWidth") <= width, (
        "the page itself never scrolls"
    )
    assert driver.execute_script(OVERLAPS) == []
    assert driver.execute_script(CONTRAST) == []
    dark = driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (scheme == "dark")
    wide = driver.execute_script(
        "const box = document.querySelector('#table-lengths').parentElement.querySelector('.scroll');"
        "return box.scrollWidth > box.clientWidth"
    )
    assert wide == (width == 400), "a wide table scrolls in itself, where it has to"
    bold = driver.execute_script(
        "return getComputedStyle(document.querySelector('.unmet .verdict')).fontWeight +"
        " getComputedStyle(document.querySelector('li:not(.unmet) .verdict')).fontWeight"
    )
    assert bold == "700400"
    assert errors_logged(driver) == []
