"""The programs in examples/, as a reader runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest
import redis as redis_py

from embedctl.queueing.broker import Broker
from tests.support.forked import run_forked
from tests.support.gateway import NO_TLS
from tests.support.jobs import job_reads, nobody_reads_jobs, reference
from tests.support.prepared import RunScript
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Each answers one of the questions, in other words.
NOTES = {
    "bread.md": "# Bread\n\nMix flour, water, salt and yeast.\n\nLet the dough rest for an hour, until it has doubled.",
    "garden/frost.md": "Cover young plants with fleece when the nights turn cold, or ice will kill them.",
    "garden/slugs.txt": "Beer traps keep snails away from the lettuce.",
    "trains.txt": "Seats can be reserved up to three months ahead.\n\nBicycles need a ticket of their own.",
    "server.txt": "The nightly copy of the database is kept for thirty days on the second machine.",
    "ignored.json": '{"text": "Where can I find an old state of the data?"}',
}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(environment: dict[str, str], short_folder: Path) -> Run:
    """Runs an example to its end."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = RunScript(str(EXAMPLES / f"{name}.py"), arguments)
        return run_forked(["destinations"], environment, short_folder, prepare=script)

    return run


@pytest.fixture
def notes(short_folder: Path) -> Path:
    folder = short_folder / "notes"
    for name, text in NOTES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_search_encodes_a_folder_once(run: Run, notes: Path, broker: Broker, start_worker: StartWorker) -> None:
    start_worker()
    first = run("semantic_search", str(notes), "Beer traps keep snails away from the lettuce.")
    assert first.returncode == 0, first.stderr
    best, text, *others = first.stdout.splitlines()
    assert best == "1.00  garden/slugs.txt, paragraph 1"
    assert text.strip() == NOTES["garden/slugs.txt"]
    assert len(others) == 4

    assert run("semantic_search", str(notes), "another question").returncode == 0
    assert sorted(job.records for job in broker.jobs.newest()) == [1, 1, 8]
    (notes / "new.txt").write_text("Something new.")
    assert run("semantic_search", str(notes), "another question").returncode == 0
    assert sorted(job.records for job in broker.jobs.newest()) == [1, 1, 1, 8, 9]


@pytest.fixture
def app(environment: dict[str, str], short_folder: Path) -> Iterator[httpx2.Client]:
    """A client of the web application."""
    pytest.importorskip("tornado")
    command = [sys.executable, str(EXAMPLES / "web_app.py"), "--port", "0"]
    log_file = short_folder / "app.log"
    with (
        log_file.open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), log_file.read_text()
        with httpx2.Client(base_url=url, timeout=60, verify=NO_TLS) as client:
            yield client
        process.terminate()
    assert "Traceback" not in log_file.read_text()


def test_the_web_app_streams_vectors(app: httpx2.Client, raw: redis_py.Redis, start_worker: StartWorker) -> None:
    texts = ["one", "", "three words here"]
    key = {"Idempotency-Key": "k"}
    made = app.post("/jobs", content="\n".join(texts), headers=key)
    assert made.status_code == 202
    job = made.json()["job"]
    assert app.post("/jobs", content="\n".join(texts), headers=key).json() == made.json()
    conflict = app.post("/jobs", content="other\ntexts", headers=key)
    assert (conflict.status_code, "record 0" in conflict.json()["error"]) == (409, True)
    assert app.get(f"/jobs/{job}").json() == {"state": "queued", "records": 3, "done": 0, "failed": 0}

    before = job_reads(raw)
    with ThreadPoolExecutor() as pool, httpx2.Client(base_url=app.base_url, verify=NO_TLS) as impatient:
        gone = pool.submit(impatient.get, f"/jobs/{job}/vectors", timeout=1)
        eventually(lambda: job_reads(raw) > before, what="a look at the job")
        with pytest.raises(httpx2.TimeoutException):
            gone.result()
    eventually(lambda: nobody_reads_jobs(raw), what="the end of the wait for a client that has gone")

    start_worker()
    answer = app.get(f"/jobs/{job}/vectors")
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.status_code == 200
    assert [row["position"] for row in rows] == [0, 1, 2]
    assert rows[1]["error"] == "empty"
    np.testing.assert_allclose([rows[0]["vector"], rows[2]["vector"]], reference([texts[0], texts[2]]), atol=1e-7)
    assert app.get(f"/jobs/{job[:20]}").status_code == 404  # a shortened id might name the job of another client
    assert app.delete(f"/jobs/{job}").status_code == 204
    missing = app.get(f"/jobs/{job}/vectors")
    assert (missing.status_code, job in missing.json()["error"]) == (404, True)


def test_every_example_says_how_it_is_run_and_is_named_in_the_pages() -> None:
    pages = (EXAMPLES.parent / "docs" / "library.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"python {path.name} " in path.read_text(encoding="utf-8")
        assert f"(../examples/{path.name})" in pages
