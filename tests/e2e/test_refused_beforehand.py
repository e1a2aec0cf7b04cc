"""What can't go to its destination is refused before anything is queued, and a wrong option has status 2."""

from __future__ import annotations

import json

import pytest

from tests.support.databases import Postgres, database
from tests.support.here import Here


@pytest.fixture(autouse=True)
def _corpus(here: Here) -> None:
    rows = [{"id": f"r{number}", "text": f"text {number}"} for number in range(20)]
    (here.folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def job_ids(here: Here) -> list[str]:
    return [job.id for job in here.broker.jobs.newest()]


def test_a_folder_with_parts_of_another_job(here: Here) -> None:
    here.start_worker()
    first = here.embedctl("submit", "c.jsonl", "-o", "parts/", "--resume", "k", "--json", status=0)
    job_id = json.loads(first.stdout)["id"]
    here.embedctl("submit", "c.jsonl", "-o", "parts/", "--resume", "k", status=0)
    here.embedctl("submit", "c.jsonl", "-o", "parts/", "--resume", job_id, status=0)
    for more in [(), ("--resume", "another"), ("--dry-run",)]:
        refused = here.embedctl("submit", "c.jsonl", "-o", "parts/", *more, status=2)
        assert f"holds manifest.json of job {job_id}" in refused.stderr
    here.embedctl("run", "c.jsonl", "--class", "dummy", "-o", "parts/", status=2)
    assert job_ids(here) == [job_id]


@pytest.mark.parametrize("kind", ["pgvector", "lancedb", "qdrant-http"])
def test_a_table_of_another_model_or_of_other_columns(request: pytest.FixtureRequest, here: Here, kind: str) -> None:
    here.start_worker()
    table = database(request, kind, here.folder)
    here.embedctl("run", "c.jsonl", "--class", "dummy", "-o", table.url, status=0)
    for command in ("submit", "run"):
        other = here.embedctl(command, "c.jsonl", "--class", "dummy", "--prompt", "q: ", "-o", table.url, status=65)
        assert "is bound to vectors of" in other.stderr
    if isinstance(table, Postgres):
        table.connection.execute(f"DROP TABLE {table.table}; CREATE TABLE {table.table} (id text PRIMARY KEY)")
        others = here.embedctl("submit", "c.jsonl", "-o", table.url, status=1)
        assert "needs a column source of the type bytea" in others.stderr
    assert job_ids(here) == []


def test_what_is_not_there(here: Here, s3_variables: dict[str, str]) -> None:
    (here.folder / "file").touch()
    wrong = ["no/such/v.npy", "no/such/parts/", "file/parts/", "lancedb:file/db?table=t"]
    for output in wrong:
        assert "there is no folder" in here.embedctl("submit", "c.jsonl", "-o", output, status=2).stderr
    missing = here.embedctl("submit", "c.jsonl", "-o", "s3://missing/p/", status=2, **s3_variables)
    assert "s3://missing/p/ can't be used" in missing.stderr
    assert job_ids(here) == []
