"""The dashboard as an operator sees it, in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl import enqueue_embeddings
from embedctl_config.celery_app import TASK
from embedctl_config.settings import Settings
from tests.support.browser import chromium, errors_logged
from tests.support.dashboard import dashboard
from tests.support.limits import limited
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")

CHUNKS = 15
# In one call, for the page may draw the table again meanwhile.
ROWS = (
    "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
    ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
)


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_an_operator_with_a_password_sees_workers_queues_and_tasks(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker, short_folder: Path, tmp_path: Path
) -> None:
    environment["LIMIT_REISSUE_S"] = "60"  # one ticket a chunk
    name = start_worker("slow").row().name
    texts = [f"confidential {i} " + "word " * 60 for i in range(5 * CHUNKS)]
    users = short_folder / "users"
    users.write_text("kim:fl0w3r\n")
    with (
        dashboard(environment, short_folder, "--auth-file", str(users)) as flower,
        chromium("--window-size=1500,950") as driver,
    ):

        def rows(page: str, table: str) -> list[list[str]]:
            """What a table of a page shows once it is filled; neither a record's text nor an error is on the page."""
            driver.get(f"{flower.url.replace('http://', 'http://kim:fl0w3r@')}{page}")
            eventually(lambda: any(len(row) > 1 for row in driver.execute_script(ROWS, table)))
            driver.save_screenshot(str(tmp_path / f"{page}.png"))
            assert "confidential" not in driver.page_source
            assert errors_logged(driver) == []
            shown: list[list[str]] = driver.execute_script(ROWS, table)
            return shown

        # From here on Flower hears of every ticket.
        eventually(lambda: [name, "Online"] in [row[:2] for row in rows("workers", "workers-table")])
        job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=limited(settings, reissue_s=60))
        (queue,) = rows("broker", "queue-table")
        assert (queue[0], queue[4]) == ("embed.slow.dummy", "1")  # consumers
        job.wait(timeout=60)
        done = [
            [TASK, f"job {job.id}, chunk {chunk}", "SUCCESS", name, "class slow, model dummy"]
            for chunk in range(CHUNKS)
        ]
        eventually(
            lambda: sorted([*row[:3], row[5], row[7]] for row in rows("tasks", "tasks-table")) == sorted(done),
            show=lambda: str(rows("tasks", "tasks-table")),
        )
        driver.find_element("css selector", "#tasks-table tbody a[href*='/task/']").click()
        eventually(lambda: f"job {job.id}, chunk" in driver.execute_script("return document.body.innerText"))
