"""Deliveries and syncs of a client whose Redis forgets its last writes, or whose clock is wrong."""

from __future__ import annotations

import pytest

from tests.support.changes import DELETE, Nights, did, many, next_day, told
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.prepared import InTurn, MoveClock, PauseAt, Put, Step
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually

DAY_S = 86_400
#: Each chunk of eight records is a batch.
SMALL_BATCHES = Put({("embedctl.destinations.postgresql:PostgresTable", "batch_records"): 8})
SUBMITTING = ("embedctl.cli.job_command", "submit", 1)
DELIVERING = ("embedctl.cli.destination", "deliver", 1)
WAITING = ("embedctl.jobs.job:Job", "wait", 1)


def writing(batch: int) -> Step:
    return "embedctl.destinations.rows:Rows", "_write", batch


@pytest.fixture
def redis_server(own_redis: RedisServer) -> RedisServer:
    """A Redis for this test alone, which forgets."""
    return own_redis


@pytest.mark.slow
@pytest.mark.parametrize(
    ("since", "until", "syncs"),
    [
        (SUBMITTING, DELIVERING, True),  # the job was never made
        (SUBMITTING, writing(2), True),
        (("embedctl.destinations.rows:Rows", "add", 1), writing(1), True),  # the job has fewer results, or none
        (writing(1), writing(3), False),
        (writing(2), WAITING, True),
    ],
    ids=["unmade", "unmade and written", "without results", "delivery", "written"],
)
def test_redis_forgets_meanwhile(
    here: Here, nights: Nights, redis_server: RedisServer, since: Step, until: Step, syncs: bool
) -> None:
    here.start_worker()
    documents = many(40)
    nights.synced(documents)
    documents = {**documents, **{f"id-{at}": f"changed {at}" for at in range(30)}}
    here.write(documents)
    command = tuple(each for each in nights.command("--chunk-size", "8") if syncs or each != "--sync")
    first, second = here.folder / "first", here.folder / "second"
    pauses = InTurn((SMALL_BATCHES, PauseAt(since, first), PauseAt(until, second)))
    run = Forked(command, here.environment, here.folder, prepare=pauses)
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
        told(here.embedctl(*command))
    assert nights.synced(documents, *DELETE) == (40, 0, 0)
    nights.assert_holds(documents)


@pytest.mark.parametrize("seconds", [-DAY_S, DAY_S])
def test_a_clock_that_is_wrong_changes_nothing(here: Here, nights: Nights, seconds: int) -> None:
    here.start_worker()
    documents = many(40)
    here.write(documents)
    wrong = MoveClock(seconds)
    delivery = [each for each in nights.command() if each != "--sync"]
    told(here.embedctl(*delivery, prepare=wrong))
    assert nights.synced(documents) == (40, 0, None)
    documents = next_day(documents)
    here.write(documents)
    assert did(told(here.embedctl(*nights.command(*DELETE), prepare=wrong))) == (38, 2, 1)
    assert nights.synced(documents, *DELETE) == (40, 0, 0)
    nights.assert_holds(documents)
    assert len(list(here.broker.jobs.newest())) == 1, "a sync frees its job"
