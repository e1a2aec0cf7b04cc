"""A job whose only way out is a database: its results leave Redis as they become durable there."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl import Job, JobDrained, JobHeld
from embedctl.corpus.rows import Rows, records_of
from embedctl.destinations import rows
from embedctl.destinations.loop import Delivered, RefusedRecord
from embedctl.destinations.right import DrainRight
from embedctl.jobs.enqueue import submit
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store import Drains
from embedctl.waiting.waiter import Waiter
from embedctl_config.settings import Settings
from tests.support.databases import Database
from tests.support.drained_parts import results_in_redis
from tests.support.failpoints import killed_at
from tests.support.here import Here
from tests.support.jobs import assert_same_vectors, other_vectors, reference
from tests.support.limits import limited
from tests.support.packages import need
from tests.support.rig import TEXTS_OF_13_CHUNKS as TEXTS
from tests.support.rig import Rig
from tests.support.waiting import PATIENCE_S

CHUNKS = 13
GOOD = [i for i in range(100) if i not in (7, 93)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("postgresql.PostgresTable", "lancedb.LanceTable", "qdrant.QdrantCollection"):
        monkeypatch.setattr(f"embedctl.destinations.{each}.batch_records", 16, raising=False)


def submitted(broker: Broker, items: Sequence[Any], *, keep: Sequence[str] = (), vectors: str = "dense") -> Job:
    """A job that was made to be drained."""
    options = SubmitOptions(chunk_size=8, drain=True, digests=True, keep=keep, vectors=vectors)
    return submit(broker, records_of(items, Rows(10**6, keep=keep)), options)


def ended(rig: Rig, vectors: str = "dense") -> Job:
    """An ended job that was made to be drained. Two of its records have failed."""
    texts = [{"text": "" if i in (7, 93) else text} for i, text in enumerate(TEXTS)]
    job = submitted(rig.broker, texts, vectors=vectors)
    rig.run_all(job, range(CHUNKS))
    return job


@pytest.fixture
def job(rig: Rig) -> Job:
    return ended(rig)


def assert_whole(job: Job, table: Database) -> None:
    there = table.rows()
    assert sorted(there) == sorted(f"{job.id}:{i}" for i in GOOD)
    vectors = np.array([there[f"{job.id}:{i}"][0] for i in GOOD])
    np.testing.assert_allclose(vectors, reference([TEXTS[i] for i in GOOD]), rtol=0, atol=1e-6)


def deliver(job: Job, table: Database, **given: Any) -> Delivered:
    return job.deliver(table.url, duplicates="position", **given)


def test_what_is_durable_leaves_redis_and_failed_records_are_still_told(job: Job, table: Database) -> None:
    assert deliver(job, table) == Delivered(written=98, failed=2)
    assert_whole(job, table)
    assert results_in_redis(job) == set()
    assert [(each.position, each.code.value) for each in job.errors()] == [(7, "empty"), (93, "empty")]
    with pytest.raises(JobDrained, match=r"98 vectors .* have left Redis for "):
        job.vectors()
    assert deliver(job, table) == Delivered(written=98, failed=2), "a second call counts the same"


@pytest.mark.parametrize("to", ["v.npy", "v.jsonl", "parts/", "lancedb:elsewhere?table=t"])
def test_what_asks_for_the_vectors_elsewhere_is_told_where_they_went(
    job: Job, table: Database, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with killed_at(Drains, "unlink", 2, after=True):
        deliver(job, table)
    left = results_in_redis(job)
    assert 0 < len(left) < CHUNKS
    told = rf"31 vectors of job {job.id} have left Redis for {re.escape(table.url)}.*delivers the others there"
    with pytest.raises(JobDrained, match=told):
        Job(job.id, job._broker).deliver(to)
    assert results_in_redis(job) == left
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == []
    assert deliver(job, table).failed == 2
    assert_whole(job, table)


def test_records_that_are_retried_afterwards_count_once(job: Job, rig: Rig, table: Database) -> None:
    deliver(job, table)
    assert job.retry_failed() == 2
    rig.run_all(job, (CHUNKS, CHUNKS + 1))
    assert deliver(job, table) == Delivered(written=98, failed=2)
    assert results_in_redis(job) == set()
    assert [each.position for each in job.errors()] == [7, 93]


STEPS = [
    (owner, name, count, after)
    for owner, name in [(rows.Rows, "flush"), (Drains, "note"), (Drains, "unlink")]
    for count in (1, 3)
    for after in (False, True)
]


@pytest.mark.parametrize(
    ("vectors", "step"),
    [*(("dense", step) for step in STEPS), *(("sparse,multi", step) for step in STEPS[::3])],
)
def test_a_delivery_that_dies_between_two_steps_goes_on(rig: Rig, table: Database, vectors: str, step: Any) -> None:
    job, (owner, name, count, after) = ended(rig, vectors), step
    dense = {i: {"dense": vector} for i, vector in zip(GOOD, reference([TEXTS[i] for i in GOOD]), strict=True)}
    expected = {f"{job.id}:{i}": each for i, each in (other_vectors(job) or dense).items()}
    with killed_at(owner, name, count, after=after):
        deliver(job, table)
    there = table.other_vectors() if table.exists() else {}
    for chunk in set(range(CHUNKS)) - results_in_redis(job):
        for i in range(8 * chunk, min(8 * chunk + 8, 100)):
            assert i not in GOOD or f"{job.id}:{i}" in there, "nothing leaves Redis that is not durable"
    done = deliver(job, table)
    assert (done.written + done.unchanged, done.failed) == (98, 2)
    assert done.unchanged <= 16, "one batch at most is written twice"
    there = table.other_vectors()
    assert there.keys() == expected.keys()
    for label, of_record in expected.items():
        assert_same_vectors(there[label], of_record)
    assert results_in_redis(job) == set()


def test_a_table_that_was_dropped_in_between_is_noticed(job: Job, table: Database) -> None:
    with killed_at(Drains, "unlink", 2, after=True):
        deliver(job, table)
    left = results_in_redis(job)
    table.remove()
    with pytest.raises(JobDrained, match="does not hold what was delivered there"):
        deliver(job, table)
    assert results_in_redis(job) == left


def test_two_deliveries_at_once_are_refused(job: Job, table: Database) -> None:
    right = DrainRight(Waiter(job.id, job._broker), 10**6)
    right.take()
    with pytest.raises(JobHeld):
        deliver(job, table)
    assert len(results_in_redis(job)) == CHUNKS


def test_refused_records_are_told_again_after_a_death(rig: Rig, table: Database) -> None:
    items = [{"text": text, "title": "nul\0" if i == 3 else "t"} for i, text in enumerate(TEXTS)]
    job = submitted(rig.broker, items, keep=["title"])
    rig.run_all(job, range(CHUNKS))
    with killed_at(Drains, "unlink", 2, after=True):
        deliver(job, table)
    refused: list[RefusedRecord] = []
    assert deliver(job, table, refused=refused.append) == Delivered(written=99, refused=1)
    assert [each.position for each in refused] == [3]


def test_a_job_with_more_results_than_redis_may_hold_flows_into_a_table(
    rig: Rig, settings: Settings, table: Database
) -> None:
    own = limited(settings, results_high_water_bytes=2_000)
    job = submitted(Broker.shared(own), TEXTS)

    def work() -> None:
        while not job.status().state.ended:
            rig.run()
            time.sleep(0.01)  # most bells find that the job waits for its reader

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert Job.get(job.id, own).deliver(table.url, duplicates="position").written == 100
    thread.join(PATIENCE_S)
    assert results_in_redis(job) == set()


SMALL = {"LIMIT_RESULTS_HIGH_WATER_BYTES": "40000", "LIMIT_HIGH_WATER_BYTES": "20000"}


@pytest.mark.parametrize("command", [("submit", "--drain"), ("submit", "--sync"), ("run", "--class", "dummy")], ids=str)
def test_commands_whose_job_has_no_other_way_out_release_it(here: Here, command: tuple[str, ...]) -> None:
    texts = [f"text {i}" for i in range(1000)]
    lines = [json.dumps({"id": f"r{i}", "text": text}) for i, text in enumerate(texts)]
    (here.folder / "c.jsonl").write_text("\n".join(lines))
    here.start_worker()
    name, *options = command
    here.embedctl(name, "c.jsonl", *options, "--chunk-size", "50", "-o", "lancedb:v?table=t", **SMALL, status=0)
    table = need("lancedb").connect(here.folder / "v").open_table("t")
    assert sorted(table.to_arrow()["id"].to_pylist()) == sorted(f"r{i}" for i in range(1000))
    if "--drain" in command:
        [job_id] = [each["id"] for each in json.loads(here.embedctl("list", "--json").stdout)]
        done = here.embedctl("fetch", job_id, "-o", "v.npy", status=1)
        assert "1,000 vectors" in done.stderr
        assert "have left Redis for lancedb:v?table=t" in done.stderr
