"""Inline jobs, which are made in one round trip, and how much their callers ask of Redis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import redis as redis_py

from embedctl import Job, JobNotFound, JobState, enqueue_embeddings
from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.enqueue import submit
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store.connection import Connection
from embedctl.store.scripts import ScriptCall, script_source
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.store import QUEUE, claim, complete, row, take
from tests.support.waiting import PATIENCE_S

TEXTS = ["one", "two", "three", "four"]


@pytest.fixture(autouse=True)
def _scripts_are_known(raw: redis_py.Redis) -> None:
    """Otherwise the first round trip of all runs none of them."""
    for name in ("create", "add", "seal"):
        raw.script_load(script_source(name))


def scripts_run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    trips: list[list[str]] = []
    script, run = Connection.script, Connection._run_scripts

    def one(self: Connection, name: str, *rest: Any) -> Any:
        trips.append([name])
        return script(self, name, *rest)

    def several(self: Connection, calls: list[ScriptCall], *_: object) -> Any:
        trips.append([call.name for call in calls])
        return run(self, calls)

    monkeypatch.setattr(Connection, "script", one)
    monkeypatch.setattr(Connection, "_run_scripts", several)
    return trips


@pytest.mark.in_redis
def test_an_inline_job_is_made_in_one_round_trip(
    settings: Settings, broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue_embeddings(TEXTS, settings=settings)
    broker.workers.beat(row())
    trips = scripts_run(monkeypatch)
    job = enqueue_embeddings(TEXTS, settings=settings)
    assert trips == [["create", "add", "seal"]]
    assert raw.llen(QUEUE) > 0  # bells
    status = job.status()
    assert (status.state, status.records, status.chunks, status.sealed) == (JobState.QUEUED, 4, 1, True)
    assert not raw.exists(keys.producer(job.id))


def test_a_redis_without_the_scripts_gets_them(settings: Settings, broker: Broker, raw: redis_py.Redis) -> None:
    raw.script_flush()
    job = enqueue_embeddings(TEXTS, settings=settings)
    assert job.status().state is JobState.QUEUED
    assert take(broker) is not None


@pytest.mark.in_redis
def test_the_end_of_a_new_job_is_heard_with_one_look(settings: Settings, broker: Broker, raw: redis_py.Redis) -> None:
    job = enqueue_embeddings(TEXTS, settings=settings)
    assert claim(broker, job.id, 0) is not None
    assert complete(broker, job.id, 0) == "ok"
    raw.config_resetstat()
    job._waiter._new_until = math.inf  # however slow this machine is
    assert job.wait(PATIENCE_S).state is JobState.COMPLETED
    assert raw.info("commandstats")["cmdstat_hgetall"]["calls"] <= 1 + 1  # and perhaps one of the reaper
    assert raw.info("commandstats")["cmdstat_xread"]["calls"] == 1
    raw.config_resetstat()
    assert len(job.vectors()) == 4
    assert "cmdstat_hgetall" not in raw.info("commandstats")
    Job.get(job.id, settings).discard()  # by somebody else
    with pytest.raises(JobNotFound):
        job.vectors()


@pytest.mark.parametrize("failing", ["add", "seal"])
def test_a_step_that_fails_is_taken_by_itself(
    settings: Settings, broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    run = Connection._run_scripts

    def forgetful(self: Connection, calls: list[ScriptCall], *_: object) -> Any:
        wrong = redis_py.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        at = [call.name for call in calls].index(failing)
        return [*run(self, calls[:at]), wrong, *run(self, calls[at + 1 :])]

    monkeypatch.setattr(Connection, "_run_scripts", forgetful)
    job = enqueue_embeddings(TEXTS, settings=settings)
    assert (job.status().state, job.status().records) == (JobState.QUEUED, 4)
    assert take(broker) is not None
    assert raw.zcard(keys.JOBS) == 1


def test_a_lost_answer_makes_neither_a_second_job_nor_a_second_chunk(
    broker: Broker, settings: Settings, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Connection._run_scripts
    lost: list[object] = []

    def once_lost(self: Connection, calls: list[ScriptCall], *_: object) -> Any:
        answers = run(self, calls)
        if not lost:
            lost.append(answers)
            return run(self, calls)  # as redis-py does after a lost connection
        return answers

    monkeypatch.setattr(Connection, "_run_scripts", once_lost)
    job = submit(broker, records_of(TEXTS, Rows(1000)), SubmitOptions(), at_hand=True)
    assert (job.status().records, job.status().chunks, job.status().sealed) == (4, 1, True)
    assert raw.zcard(keys.JOBS) == 1
    assert [take(broker, str(at)) is not None for at in range(2)] == [True, False]


@pytest.mark.in_redis
def test_a_job_nobody_knows_is_cancelled(settings: Settings, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Connection._run_scripts

    def interrupted(self: Connection, calls: list[ScriptCall], *_: object) -> Any:
        run(self, calls)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "_run_scripts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        enqueue_embeddings(TEXTS, settings=settings)
    (job_id,) = broker.jobs.newest_ids(5)
    assert broker.jobs.status(job_id).state is JobState.CANCELLED


def test_an_input_that_is_wrong_leaves_no_job(settings: Settings, broker: Broker) -> None:
    class Failing(list[str]):
        def __iter__(self) -> Any:
            yield from super().__iter__()
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        enqueue_embeddings(Failing("abc"), settings=settings)
    assert list(broker.jobs.newest()) == []


def test_create_is_asked_with_an_age_of_seconds_at_most(broker: Broker, raw: redis_py.Redis) -> None:
    connection = broker.connection
    exact = connection.now_ms()
    raw.config_resetstat()
    assert abs(connection.recent_now_ms() - exact) < 5000
    assert "cmdstat_time" not in raw.info("commandstats")
    connection.close()
    connection.recent_now_ms()
    assert raw.info("commandstats")["cmdstat_time"]["calls"] == 1
