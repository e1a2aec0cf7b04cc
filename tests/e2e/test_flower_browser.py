"""The dashboard as an operator sees it: in a browser, while a job runs and afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedctl import enqueue_embeddings
from embedctl_config.celery_app import TASK
from embedctl_config.settings import Settings
from tests.support.browser import chromium, errors_logged
from tests.support.dashboard import dashboard
from tests.support.limits import limited
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CHUNKS = 30


class Browser:
    """Headless Chromium; what it shows is also kept as pictures."""

    def __init__(self, driver: Chrome, pictures: Path) -> None:
        self.driver = driver
        self._pictures = pictures

    def open(self, url: str) -> None:
        self.driver.get(url)

    def rows(self, table: str) -> list[list[str]]:
        """The cells of a table, as they are shown."""
        # In one call, for the page may draw the table again meanwhile.
        cells: list[list[str]] = self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
            ".map(row => [...row.cells].map(cell => cell.innerText.trim()))",
            f"#{table}",
        )
        return cells

    def text(self) -> str:
        return str(self.driver.execute_script("return document.body.innerText"))

    def dom(self) -> str:
        return str(self.driver.execute_script("return document.documentElement.outerHTML"))

    def keep(self, name: str) -> None:
        """Take a picture, and check that nothing on the page is a record's text or an error."""
        self.driver.save_screenshot(str(self._pictures / f"{name}.png"))
        assert "confidential" not in self.dom()
        assert errors_logged(self.driver) == []


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium("--window-size=1500,950") as started:
        started.set_page_load_timeout(30)
        yield Browser(started, tmp_path)


def test_an_operator_sees_a_running_job(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker, short_folder: Path, browser: Browser
) -> None:
    environment["LIMIT_REISSUE_S"] = "60"  # one ticket a chunk
    worker = start_worker("slow")
    texts = [f"confidential {i} " + "word " * 60 for i in range(5 * CHUNKS)]
    with dashboard(environment, short_folder) as flower:
        name = worker.row().name
        browser.open(f"{flower.url}workers")
        # From here on Flower hears of every ticket.
        eventually(lambda: [name, "Online"] in [row[:2] for row in browser.rows("workers-table")])
        job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=limited(settings, reissue_s=60))
        eventually(lambda: any(row[:2] == [name, "Online"] and int(row[2]) for row in browser.rows("workers-table")))
        browser.keep("workers")

        browser.open(f"{flower.url}broker")
        (queue,) = browser.rows("queue-table")
        assert queue[0] == "embed.slow.dummy"
        assert int(queue[1]) > 0
        assert queue[4] == "1"  # consumers
        browser.keep("broker")

        def tasks() -> list[list[str]]:
            browser.open(f"{flower.url}tasks")
            eventually(lambda: len(browser.rows("tasks-table")) > 1)
            return browser.rows("tasks-table")

        eventually(lambda: {"STARTED", "SUCCESS"} <= {row[2] for row in tasks()})
        browser.keep("tasks")
        shown = browser.rows("tasks-table")
        assert {row[0] for row in shown} == {TASK}
        assert {row[1] for row in shown} <= {f"job {job.id}, chunk {chunk}" for chunk in range(CHUNKS)}
        assert {row[5] for row in shown} == {name}
        assert "class slow, model dummy" in {row[7] for row in shown}
        assert not job.status().state.ended

        browser.driver.find_element("css selector", "#tasks-table tbody a[href*='/task/']").click()
        eventually(lambda: f"job {job.id}, chunk" in browser.text())
        browser.keep("task")

        browser.open(f"{flower.url}workers")
        eventually(lambda: browser.driver.find_elements("link text", name))
        browser.driver.find_element("link text", name).click()
        eventually(lambda: "Worker PID" in browser.text())
        browser.keep("worker")

        job.wait(timeout=60)
        eventually(lambda: f"of {CHUNKS} tasks" in (tasks() and browser.text()))
        browser.driver.find_element("css selector", "[data-task-state=SUCCESS]").click()
        eventually(lambda: f"1 to 15 of {CHUNKS} tasks" in browser.text())
        assert {row[2] for row in browser.rows("tasks-table")} == {"SUCCESS"}
        browser.keep("tasks-done")
        browser.open(f"{flower.url}broker")
        assert [row[:2] for row in browser.rows("queue-table")] == [["embed.slow.dummy", "0"]]
        assert flower.stop() == 0

    users = short_folder / "users"
    users.write_text("kim:fl0w3r\n")
    with dashboard(environment, short_folder, "--auth-file", str(users)) as flower:
        browser.open(f"{flower.url.replace('http://', 'http://kim:fl0w3r@')}tasks")
        # The history is still there, and the page's own requests are let in too.
        eventually(lambda: f"of {CHUNKS} tasks" in browser.text())
        browser.keep("tasks-of-before")
