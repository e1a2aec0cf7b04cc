"""The programs in examples/, as a reader runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis as redis_py

from embedctl.broker import Broker
from tests.support.forked import run_forked
from tests.support.jobs import job_reads, nobody_reads_jobs, reference
from tests.support.prepared import RunScript
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "all-MiniLM-L6-v2"

#: Each answers one of the questions, in other words.
NOTES = {
    "bread.md": "# Bread\n\nMix flour, water, salt and yeast.\n\nLet the dough rest for an hour, until it has doubled.",
    "garden/frost.md": "Cover young plants with fleece when the nights turn cold, or ice will kill them.",
    "garden/slugs.txt": "Beer traps keep snails away from the lettuce.",
    "trains.txt": "Seats can be reserved up to three months ahead.\n\nBicycles need a ticket of their own.",
    "server.txt": "The nightly copy of the database is kept for thirty days on the second machine.",
    "ignored.json": '{"text": "Where can I find an old state of the data?"}',
}
QUESTIONS = {
    "How long does the dough have to rise?": "bread.md, paragraph 3",
    "protecting seedlings from low temperatures": "garden/frost.md, paragraph 1",
    "May I take my bike with me?": "trains.txt, paragraph 2",
    "Where can I find an old state of the data?": "server.txt, paragraph 1",
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

    (notes / "empty").mkdir()
    nothing = run("semantic_search", str(notes / "empty"), "anything")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "holds no .txt or .md file" in nothing.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_search_finds_what_is_said_in_other_words(
    run: Run, notes: Path, environment: dict[str, str], start_worker: StartWorker
) -> None:
    environment |= {"EMBEDCTL_MODEL": MODEL, "EMBEDCTL_HARDWARE": "cpu", "EMBEDCTL_LEASE_S": "30"}
    start_worker("cpu", model=MODEL)
    for question, place in QUESTIONS.items():
        found = run("semantic_search", str(notes), question)
        assert found.returncode == 0, found.stderr
        assert found.stdout.splitlines()[0].endswith(f"  {place}"), f"{question}\n{found.stdout}"


class App:
    """The web application, and a client of it."""

    def __init__(self, environment: dict[str, str], log_file: Path) -> None:
        self.log_file = log_file
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / "web_app.py"), "--port", "0"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), log_file.read_text()

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
        data = None if body is None else body.encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def app(environment: dict[str, str], short_folder: Path) -> Iterator[App]:
    pytest.importorskip("tornado")
    app = App(environment, short_folder / "app.log")
    yield app
    app.process.terminate()
    app.process.wait(60)
    assert app.process.stdout
    app.process.stdout.close()


def test_the_web_application_answers_at_once_and_streams_vectors(
    app: App, raw: redis_py.Redis, start_worker: StartWorker
) -> None:
    texts = ["one", "", "three words here"]
    code, answer = app.ask("POST", "/jobs", "\n".join(texts), **{"Idempotency-Key": "k"})
    job = json.loads(answer)["job"]
    assert code == 202
    assert app.ask("POST", "/jobs", "\n".join(texts), **{"Idempotency-Key": "k"}) == (202, answer)
    code, conflict = app.ask("POST", "/jobs", "other\ntexts", **{"Idempotency-Key": "k"})
    assert code == 409
    assert "record 0" in json.loads(conflict)["error"]
    status = {"state": "queued", "records": 3, "done": 0, "failed": 0}
    assert app.ask("GET", f"/jobs/{job}") == (200, json.dumps(status))

    impatient = HTTPConnection(urlsplit(app.url).netloc)
    before = job_reads(raw)
    impatient.request("GET", f"/jobs/{job}/vectors")
    eventually(lambda: job_reads(raw) > before, what="a look at the job")
    impatient.close()
    eventually(lambda: nobody_reads_jobs(raw), what="the end of the wait for a client that has gone")

    start_worker()
    code, lines = app.ask("GET", f"/jobs/{job}/vectors")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert code == 200
    assert [row["position"] for row in rows] == [0, 1, 2]
    assert rows[1]["error"] == "empty"
    np.testing.assert_allclose([rows[0]["vector"], rows[2]["vector"]], reference([texts[0], texts[2]]), atol=1e-7)
    assert app.ask("GET", f"/jobs/{job[:20]}")[0] == 404  # a shortened id might name the job of another client
    assert app.ask("DELETE", f"/jobs/{job}") == (204, "")
    code, gone = app.ask("GET", f"/jobs/{job}/vectors")
    assert code == 404
    assert job in json.loads(gone)["error"]
    assert app.ask("GET", "/jobs/../../etc/passwd")[0] == 404
    assert "Traceback" not in app.log_file.read_text()


def test_every_example_says_how_it_is_run_and_is_named_in_the_pages() -> None:
    pages = (EXAMPLES.parent / "docs" / "library.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"python {path.name} " in path.read_text(encoding="utf-8")
        assert f"(../examples/{path.name})" in pages
