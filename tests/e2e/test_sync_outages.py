"""Deliveries and syncs of a client whose Redis forgets its last writes, or whose clock is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl.broker import Broker
from tests.support.changes import DELETE, Write, assert_table, did, many, next_day, night, told
from tests.support.databases import Database, database
from tests.support.forked import Forked, run_forked
from tests.support.prepared import InTurn, MoveClock, PauseAt, Put, Step
from tests.support.processes import RunEmbedctl
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

DAY_S = 86_400
#: Each chunk of eight records is a batch.
SMALL_BATCHES = Put({("embedctl.destinations.postgresql:PostgresTable", "batch_records"): 8})
SUBMITTING = ("embedctl.cli.job_command", "submit", 1)
DELIVERING = ("embedctl.cli.delivery", "deliver", 1)
WAITING = ("embedctl.job:Job", "wait", 1)


def writing(batch: int) -> Step:
    return "embedctl.destinations.keyed:_Delivery", "_write", batch


@pytest.fixture
def redis_server(own_redis: RedisServer) -> RedisServer:
    """A Redis for this test alone, which forgets."""
    return own_redis


@pytest.fixture
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    return database(request, "pgvector", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("since", "until"),
    [
        (SUBMITTING, DELIVERING),  # the job was never made
        (SUBMITTING, writing(2)),
        (DELIVERING, writing(1)),  # the job has fewer results, or none
        (writing(1), writing(3)),
        (writing(2), WAITING),
    ],
    ids=lambda step: f"{step[1]}-{step[2]}",
)
@pytest.mark.parametrize("syncs", [False, True], ids=["delivery", "sync"])
def test_redis_forgets_meanwhile(
    table: Database,
    write: Write,
    embedctl: RunEmbedctl,
    environment: dict[str, str],
    broker: Broker,
    redis_server: RedisServer,
    short_folder: Path,
    start_worker: StartWorker,
    since: Step,
    until: Step,
    syncs: bool,
) -> None:
    start_worker()
    documents = many(40)
    write(documents)
    told(embedctl(*night(table)))
    documents = {**documents, **{f"id-{at}": f"changed {at}" for at in range(30)}}
    write(documents)
    command = night(table, "--chunk-size", "8")
    if not syncs:
        command = tuple(each for each in command if each != "--sync")
    first, second = short_folder / "first", short_folder / "second"
    pauses = InTurn((SMALL_BATCHES, PauseAt(since, first), PauseAt(until, second)))
    run = Forked(command, environment, short_folder, prepare=pauses)
    eventually(first.exists)
    written = redis_server.written()
    assert written is not None
    first.unlink()
    eventually(second.exists)
    redis_server.forget_since(written)
    second.unlink()
    _, said = run.communicate(timeout=120)
    if run.returncode != 0:
        assert "Traceback" not in said
        told(embedctl(*command))
    assert did(told(embedctl(*night(table, *DELETE)))) == (40, 0, 0)
    assert_table(table, documents)


@pytest.mark.parametrize("seconds", [-DAY_S, DAY_S])
def test_a_clock_that_is_wrong_changes_nothing(
    table: Database,
    write: Write,
    embedctl: RunEmbedctl,
    environment: dict[str, str],
    broker: Broker,
    short_folder: Path,
    start_worker: StartWorker,
    seconds: int,
) -> None:
    start_worker()
    documents = many(40)
    write(documents)
    delivery = ("submit", "corpus.jsonl", "-o", table.url, "--json")
    wrong = MoveClock(seconds)
    told(run_forked(delivery, environment, short_folder, prepare=wrong))
    assert did(told(embedctl(*night(table)))) == (40, 0, None)
    documents = next_day(documents)
    write(documents)
    assert did(told(run_forked(night(table, *DELETE), environment, short_folder, prepare=wrong))) == (38, 2, 1)
    assert did(told(embedctl(*night(table, *DELETE)))) == (40, 0, 0)
    assert_table(table, documents)
    assert len(list(broker.jobs.newest())) == 1, "a sync frees its job"
