"""The dashboard, also in a browser: it agrees with embedctl, changes nothing and reveals nothing."""

from __future__ import annotations

import json
import signal
from base64 import b64encode
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis as redis_py

from embedctl import enqueue_embeddings
from embedctl_config.keys import TASK
from tests.support.browser import chromium, errors_logged
from tests.support.dashboard import PAGES, dashboard
from tests.support.here import Here
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually


@pytest.mark.slow
def test_flower_and_status_agree_about_a_running_job(here: Here) -> None:
    texts = [f"secret {i} " + "word " * 60 for i in range(60)]
    with dashboard(here.environment, here.folder) as flower:
        worker = here.start_worker("slow")
        job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=here.settings)

        def agree() -> bool:
            states = [task["state"] for task in flower.tasks(job.id)]
            status = job.status()
            running = 2 <= status.chunks_done < status.chunks
            return running and "STARTED" in states and states.count("SUCCESS") == status.chunks_done

        eventually(agree)
        job.wait(timeout=60)
        eventually(lambda: {task["state"] for task in flower.tasks(job.id)} == {"SUCCESS"})
        tasks = flower.tasks(job.id)
        assert sorted(task["args"] for task in tasks) == sorted(f"job {job.id}, chunk {i}" for i in range(12))
        assert {task["kwargs"] for task in tasks} == {"class slow, model dummy"}
        assert {(task["name"], task["worker"]) for task in tasks} == {(TASK, worker.row().name)}
        assert "secret" not in json.dumps(tasks)
        assert flower.stop() == 0

    with dashboard(here.environment, here.folder) as flower:
        # The history outlives it.
        assert {task["uuid"] for task in flower.tasks(job.id)} == {task["uuid"] for task in tasks}
    assert {path.stat().st_mode & 0o777 for path in (here.folder / "state").glob("flower-*")} == {0o700}


@pytest.mark.slow
def test_it_changes_nothing_and_answers_no_other_site(here: Here) -> None:
    from flower.urls import handlers
    from tornado.web import RequestHandler

    with dashboard(here.environment, here.folder, "--url-prefix", "/flower") as flower:
        assert flower.get("/flower/workers")[0] == 200
        assert flower.get("/flower/api/tasks", Origin=flower.url.removesuffix("/flower"))[0] == 200
        assert flower.get("/flower/api/tasks", Host="localhost")[0] == 200
        for foreign in ({"Host": "rebound.example"}, {"Origin": "https://site.example"}, {"Origin": "null"}):
            status, said = flower.get("/flower/api/tasks", **foreign)
            assert (status, "--auth-file" in said) == (403, True)

        api = [rule for rule in handlers if isinstance(rule, tuple) and rule[0].startswith("/api/")]
        changing = [path for path, handler in api if handler.post is not RequestHandler.post]
        assert len(changing) >= 13
        for path in changing:
            status, said = flower.send("POST", "/flower" + path.replace("(.+)", "x"), {"Content-Length": "0"})
            assert (status, said) == (403, "Read only mode is enabled")

        again = here.embedctl("flower", "--address", "0")
        assert (again.returncode, "running already" in again.stderr) == (1, True)
        port = str(urlsplit(flower.url).port)
        taken = here.embedctl("flower", "--address", port, EMBEDCTL_STATE_DIR=str(here.folder / "other"))
        assert (taken.returncode, "Set EMBEDCTL_FLOWER_ADDRESS to another" in taken.stderr) == (2, True)
        assert flower.stop(signal.SIGINT) == 130


@pytest.mark.slow
def test_with_users_nothing_is_shown_to_others_and_no_password_to_anybody(here: Here, own_redis: RedisServer) -> None:
    with redis_py.Redis.from_url(own_redis.url) as admin:
        admin.config_set("requirepass", "r3d1s")
    # kombu's form of a unix socket's URL shows the password.
    here.environment["EMBEDCTL_REDIS_URL"] = own_redis.url.replace("unix://", "unix://:r3d1s@")
    users = here.folder / "users"
    users.write_text("kim:fl0w3r\nlee:with:colon\n")
    with dashboard(here.environment, here.folder, "--auth-file", str(users)) as flower:

        def look(path: str, user: str) -> tuple[int, str]:
            return flower.get(path, Authorization=f"Basic {b64encode(user.encode()).decode()}", Host="flower.example")

        for path in PAGES:
            assert [flower.get(path)[0], look(path, "kim:wrong")[0]] == [401, 401], path
        shown = {path: look(path, user) for path in PAGES for user in ("kim:fl0w3r", "lee:with:colon")}
        assert {status for status, _ in shown.values()} == {200}
        told = "".join(body for _, body in shown.values()) + flower.log_file.read_text()
        told += Path(f"/proc/{flower.process.pid}/cmdline").read_text()
        assert [each for each in ("r3d1s", "fl0w3r", "with:colon") if each in told] == []


#: With the bells that find nothing, they fit on one page of the table.
CHUNKS = 8
# In one call, for the page may draw the table again meanwhile.
ROWS = (
    "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
    ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
)


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_an_operator_with_a_password_sees_workers_queues_and_tasks(here: Here, tmp_path: Path) -> None:
    pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
    name = here.start_worker("slow").row().name
    texts = [f"confidential {i} " + "word " * 60 for i in range(5 * CHUNKS)]
    users = here.folder / "users"
    users.write_text("kim:fl0w3r\n")
    with (
        dashboard(here.environment, here.folder, "--auth-file", str(users)) as flower,
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

        # From here on Flower hears of every bell.
        eventually(lambda: [name, "Online"] in [row[:2] for row in rows("workers", "workers-table")])
        job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=here.settings)
        (queue,) = rows("broker", "queue-table")
        assert (queue[0], queue[4]) == ("embed.slow.dummy", "1")  # consumers
        job.wait(timeout=60)
        done = [
            [TASK, f"job {job.id}, chunk {chunk}", "SUCCESS", name, "class slow, model dummy"]
            for chunk in range(CHUNKS)
        ]

        def of_chunks() -> list[list[str]]:
            shown = [[*row[:3], row[5], row[7]] for row in rows("tasks", "tasks-table")]
            return sorted(row for row in shown if row[1] != "nothing was ready")

        eventually(lambda: of_chunks() == sorted(done), show=lambda: str(rows("tasks", "tasks-table")))
        links = driver.find_elements("css selector", "#tasks-table tbody a[href*='/task/']")
        links[-1].click()
        eventually(lambda: f"job {job.id}, chunk" in driver.execute_script("return document.body.innerText"))
