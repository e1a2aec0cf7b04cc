"""A job's records in databases: each once, whatever is interrupted, repeated or refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from embedctl import InputError, Job, JobFailed, SettingsError, enqueue_embeddings
from embedctl.destinations.interface import Contract
from embedctl.destinations.loop import Delivered, RefusedRecord
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.databases import KINDS, Database, Lance, Postgres, QdrantByHttp
from tests.support.forked import status_of_fork
from tests.support.here import Here
from tests.support.jobs import assert_same_vectors, other_vectors, reference
from tests.support.processes import RunEmbedctl
from tests.support.rig import TEXTS_OF_13_CHUNKS as TEXTS
from tests.support.rig import Encode, Rig
from tests.support.waiting import eventually

CHUNKS = 13


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is a batch."""
    for each in ("postgresql.PostgresTable", "lancedb.LanceTable", "qdrant.QdrantCollection"):
        monkeypatch.setattr(f"embedctl.destinations.{each}.batch_records", 8, raising=False)


@pytest.fixture
def corpus(short_folder: Path) -> Path:
    path = short_folder / "c.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in named()))
    return path


def named(texts: Sequence[str] = TEXTS) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "text": text} for i, text in enumerate(texts)]


def assert_records(table: Database, ids: Sequence[str], texts: Sequence[str]) -> None:
    """The table holds the vectors of these texts under these ids, and nothing else."""
    rows = table.rows()
    assert sorted(rows) == sorted(ids)
    vectors = np.array([rows[label][0] for label in ids])
    np.testing.assert_allclose(vectors, reference(texts), rtol=0, atol=1e-6)


@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_records_are_delivered_once_and_a_second_run_changes_nothing(encode: Encode, table: Database) -> None:
    texts = ["" if i in (7, 93) else f"text {i}" for i in range(100)]
    items = [{"id": f"r{i}", "text": text, "n": i, "tags": ["a", None]} for i, text in enumerate(texts)]
    job = encode(items, keep=("n", "tags"), digests=True)
    assert job.deliver(table.url) == Delivered(written=98, failed=2)
    good = [i for i in range(100) if i not in (7, 93)]
    assert_records(table, [f"r{i}" for i in good], [texts[i] for i in good])
    rows = table.rows()
    assert rows["r50"][1] == {"n": 50, "tags": ["a", None]}
    stamps = table.stamps() if isinstance(table, Postgres) else None
    assert job.deliver(table.url) == Delivered(written=98, failed=2), "kept fields may be others"
    assert_records(table, [f"r{i}" for i in good], [texts[i] for i in good])
    if isinstance(table, Postgres):
        assert table.stamps() == stamps
    assert [error.id for error in job.errors()] == ["r7", "r93"]


@pytest.mark.usefixtures("small_batches")
def test_a_job_is_delivered_while_it_runs_if_ids_are_positions(rig: Rig, settings: Settings, table: Database) -> None:
    job = enqueue_embeddings(TEXTS, settings=settings, chunk_size=8)
    thread = threading.Thread(target=lambda: Job.get(job.id, settings).deliver(table.url, duplicates="position"))
    thread.start()
    rig.run(job, 0)
    eventually(lambda: table.exists() and len(table.rows()) == 8)
    rig.run_all(job, range(1, CHUNKS))
    thread.join(60)
    assert_records(table, [f"{job.id}:{i}" for i in range(100)], TEXTS)


def test_nothing_is_written_if_ids_are_missing_or_not_unique(encode: Encode, table: Database) -> None:
    with pytest.raises(InputError, match=r"100 records have no id"):
        encode().deliver(table.url)
    items = named()
    items[99]["id"] = "r0"
    with pytest.raises(InputError, match=r"1 id is not unique(.|\n)*record 99: its id is that of record 0"):
        encode(items).deliver(table.url)
    assert not table.exists()


@pytest.mark.parametrize(("which", "left"), [("first", 99), ("last", 0)])
def test_one_of_several_records_with_an_id_is_written(encode: Encode, table: Database, which: str, left: int) -> None:
    items = named()
    items[99]["id"] = "r0"
    assert encode(items).deliver(table.url, duplicates=which) == Delivered(written=99, left_out=1)
    kept = [i for i in range(100) if i != left]
    assert_records(table, [items[i]["id"] for i in kept], [TEXTS[i] for i in kept])


@pytest.mark.parametrize("table", ["pgvector", "qdrant-http", "lancedb"], indirect=True)
def test_what_a_table_has_lost_is_written_again(encode: Encode, table: Database) -> None:
    """Nothing but the table tells what it holds."""
    job = encode(named(), digests=True)
    assert job.deliver(table.url) == Delivered(written=100)
    destination = table.destination()
    destination.open(Contract.of(job.status(), 16, "float32"))
    destination.delete([row for row in destination.ids() if int(str(row[0])[1:]) < 40])
    destination.close()
    assert job.deliver(table.url) == Delivered(written=40, unchanged=60)
    assert_records(table, [f"r{i}" for i in range(100)], TEXTS)


@pytest.mark.parametrize("table", ["pgvector", "qdrant-http"], indirect=True)
@pytest.mark.usefixtures("small_batches")
def test_deliveries_of_a_job_at_once_double_nothing(encode: Encode, settings: Settings, table: Database) -> None:
    job = encode(named(), digests=True)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: Job.get(job.id, settings).deliver(table.url), range(3)))
    assert_records(table, [f"r{i}" for i in range(100)], TEXTS)
    assert job.deliver(table.url) == Delivered(unchanged=100)


def die_in(module: str, step: int, calls: Path, job_id: str, settings: Settings, url: str) -> None:
    """Deliver a job, and kill this process at so many calls that a module makes, whatever they do. Write how many there
    are, if they are fewer."""
    made = itertools.count()

    def count(frame: FrameType, event: str, called: object) -> None:
        caller = frame.f_back if event == "call" else frame
        called_by = caller.f_globals.get("__name__") if event in ("call", "c_call") and caller is not None else None
        is_ours = called_by in (module, f"{module}_table")
        if is_ours and next(made) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    job = Job.get(job_id, settings)
    for each in ("postgresql.PostgresTable", "lancedb.LanceTable", "qdrant.QdrantCollection"):
        found, _, name = each.partition(".")
        getattr(import_module(f"embedctl.destinations.{found}"), name).batch_records = 40
    sys.setprofile(count)
    job.deliver(url)
    sys.setprofile(None)
    calls.write_text(str(next(made)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("table", ["pgvector", "qdrant-http", "lancedb"], indirect=True)
def test_a_walk_of_kills(encode: Encode, settings: Settings, table: Database, tmp_path: Path) -> None:
    """A process dies at some steps that are spread over all calls that the destination makes of its client, its
    statements and its files. The next one goes on."""
    job = encode(named(), digests=True, vectors="dense,multi" if isinstance(table, Lance) else "dense,sparse,multi")
    own = {Postgres: "postgresql", QdrantByHttp: "qdrant", Lance: "lancedb"}[type(table)]
    module = f"embedctl.destinations.{own}"
    assert status_of_fork(die_in, module, -1, tmp_path / "calls", job.id, settings, table.url) == 0
    calls, deaths = int((tmp_path / "calls").read_text()), 0
    for at, step in enumerate(np.linspace(0, calls - 1, 11).astype(int).tolist()):
        if at % 2 == 0 and table.exists():
            table.remove()
        killed = status_of_fork(die_in, module, step, tmp_path / "calls", job.id, settings, table.url)
        deaths += killed == -signal.SIGKILL
        if table.exists():
            assert {*table.rows()} <= {f"r{i}" for i in range(100)}
    assert deaths >= 6
    done = job.deliver(table.url)
    assert done.written + done.unchanged == 100
    assert_records(table, [f"r{i}" for i in range(100)], TEXTS)
    there = table.other_vectors()
    for position, expected in other_vectors(job).items():
        assert_same_vectors(there[f"r{position}"], expected)
    destination = table.destination()
    contract = Contract.of(job.status(), 16, "float32")
    destination.open(contract)
    sources = dict(destination.ids())
    destination.close()
    made = contract.sources(hashlib.sha256(text.encode()).digest() for text in TEXTS)
    assert sources == {f"r{i}": source for i, source in enumerate(made)}


def test_retried_records_are_delivered_by_the_next_call(rig: Rig, settings: Settings, table: Database) -> None:
    texts = ["fail-encoder" if i == 42 else text for i, text in enumerate(TEXTS)]
    job = enqueue_embeddings(named(texts), settings=settings, chunk_size=8)
    rig.run_all(job, set(range(CHUNKS)) - {5})
    Rig(rig.broker, settings, DummyBackend(dim=16, poison=True)).run(job, 5)
    assert job.deliver(table.url) == Delivered(written=99, failed=1)
    job.retry_failed()
    rig.run(job, CHUNKS)
    job.deliver(table.url)
    assert_records(table, [f"r{i}" for i in range(100)], texts)


@pytest.mark.usefixtures("small_batches")
def test_a_stopped_job_is_delivered_and_later_from_its_gap(here: Here, rig: Rig, corpus: Path, table: Database) -> None:
    job = Job.get(here.embedctl("submit", str(corpus), "--chunk-size", "8").stdout.strip(), here.settings)
    rig.run_all(job, (0, 1, 3))
    (facts,) = json.loads(here.embedctl("stop", job.id, "--json", status=0).stdout)
    assert (facts["state"], facts["records"], facts["done"]) == ("stopped", 100, 24)
    fetched = here.embedctl("fetch", job.id, "-o", "part.npy", status=1)
    assert "76 records were not encoded: the job was stopped" in fetched.stderr
    assert job.deliver(table.url) == Delivered(written=24, not_encoded=76)
    done = [i for chunk in (0, 1, 3) for i in range(chunk * 8, chunk * 8 + 8)]
    assert_records(table, [f"r{i}" for i in done], [TEXTS[i] for i in done])
    here.embedctl("submit", str(corpus), "--chunk-size", "8", "--resume", job.id, status=0)
    rig.run_all(job, set(range(CHUNKS)) - {0, 1, 3})
    assert job.deliver(table.url) == Delivered(written=76, unchanged=24)
    assert_records(table, [f"r{i}" for i in range(100)], TEXTS)


def test_what_an_error_budget_ended_is_delivered_and_then_raised(rig: Rig, settings: Settings, table: Database) -> None:
    items = named(["" if i in (8, 9) else text for i, text in enumerate(TEXTS)])
    job = enqueue_embeddings(items, settings=settings, chunk_size=8, max_errors=1)
    rig.run_all(job, (0, 1))
    with pytest.raises(JobFailed):
        job.deliver(table.url)
    assert len(table.rows()) == 14


def test_a_job_without_a_vector_makes_no_table(encode: Encode, table: Database) -> None:
    assert encode(named([""] * 10)).deliver(table.url) == Delivered(failed=10)
    assert not table.exists()


def test_the_parts_of_a_drained_job_are_delivered(encode: Encode, table: Database, tmp_path: Path) -> None:
    job = encode(named())
    job.deliver(tmp_path / "parts")
    assert job.deliver(table.url).written == 100
    assert_records(table, [f"r{i}" for i in range(100)], TEXTS)
    coarse = encode(named())
    coarse.deliver(tmp_path / "bits", dtype="binary")
    with pytest.raises(SettingsError, match="drained as binary"):
        coarse.deliver(table.url)
    table.remove()
    assert coarse.deliver(table.url, dtype="binary") == Delivered(written=100)
    signs = reference(TEXTS) > 0
    distances = np.logical_xor(signs, signs[42]).sum(axis=1).tolist()
    assert table.by_hamming(signs[42]) == {f"r{i}": distance for i, distance in enumerate(distances)}
    table.remove()
    whole = encode(named())
    whole.deliver(tmp_path / "int8", dtype="int8")
    with pytest.raises(SettingsError, match="--dtype float32"):
        whole.deliver(table.url)
    assert whole.deliver(table.url, dtype="float32").written == 100


def test_records_that_postgres_refuses_are_named(encode: Encode, table: Database, embedctl: RunEmbedctl) -> None:
    items: list[dict[str, Any]] = [{**each, "title": "t"} for each in named()]
    items[42]["id"] = "nul\0here"
    items[77]["title"] = "nul\0there"
    job = encode(items, keep=["title"])
    refused: list[RefusedRecord] = []
    assert job.deliver(table.url, refused=refused.append) == Delivered(written=98, refused=2)
    assert [(each.position, each.id) for each in refused] == [(42, "nul\0here"), (77, "r77")]
    assert sorted(table.rows()) == sorted(f"r{i}" for i in range(100) if i not in (42, 77))
    done = embedctl("fetch", job.id, "-o", table.url, "--json", status=3)
    assert "record 77 (r77): refused: " in done.stderr
    assert "; 2 were refused" in done.stderr
    assert json.loads(done.stdout)["delivered"]["refused"] == 2


# The command line


def test_fetch_and_submit_deliver(here: Here, corpus: Path, table: Database) -> None:
    here.start_worker()
    done = here.embedctl("submit", str(corpus), "-o", table.url, status=0)
    assert f"Wrote 100 records to {table.url}" in done.stderr
    assert_records(table, [f"r{i}" for i in range(100)], TEXTS)
    again = here.embedctl("fetch", done.stdout.strip(), "-o", table.url, status=0)
    assert f"Wrote 0 records to {table.url}; 100 were there already" in again.stderr
    other = here.embedctl("submit", str(corpus), "--prompt", "query: ", "-o", table.url, status=65)
    assert "choose another name" in other.stderr


@pytest.mark.slow
def test_run_refuses_ids_before_it_starts_anything_and_else_delivers(here: Here, table: Database) -> None:
    def run(corpus: str, *options: str) -> subprocess.CompletedProcess[str]:
        return here.embedctl("run", corpus, "--class", "dummy", "-o", table.url, *options, EMBEDCTL_REDIS_URL="")

    (here.folder / "c.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "a", "text": "two"}\n')
    (here.folder / "c.txt").write_text("one\n\ntwo\n")
    twice, without = run("c.jsonl"), run("c.txt")
    assert (twice.returncode, without.returncode) == (2, 2)
    assert "c.jsonl, line 2: its id is that of c.jsonl, line 1" in twice.stderr
    assert "--duplicates position" in without.stderr
    assert "Loading" not in twice.stderr + without.stderr
    done = run("c.txt", "--duplicates", "position")
    assert done.returncode == 3, done.stderr
    assert "record 1: empty:" in done.stderr
    assert "Wrote 2 records" in done.stderr
    assert sorted(str(label).partition(":")[2] for label in table.rows()) == ["0", "2"]


def test_a_database_that_is_away_has_its_own_status(embedctl: RunEmbedctl, free_port: int) -> None:
    for url in (f"postgresql://me@127.0.0.1:{free_port}/x?table=t", f"qdrant+http://127.0.0.1:{free_port}/c"):
        embedctl("fetch", "20261121-000000-0000000000", "-o", url, status=69)
