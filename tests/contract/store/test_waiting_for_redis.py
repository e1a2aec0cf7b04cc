"""Those who wait while Redis is full, away or hangs: for no longer than told, and not in silence."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis as redis_py
from click.testing import CliRunner

from embedctl import (
    AsyncJob,
    Job,
    JobStalled,
    JobState,
    SettingsError,
    WaitTimeout,
    aenqueue_embeddings,
    enqueue_embeddings,
)
from embedctl.cli import main
from embedctl.common import notices
from embedctl.queueing.broker import Broker
from embedctl.store import connection
from embedctl_config import keys
from embedctl_config.errors import BrokerFull
from embedctl_config.settings import Settings
from tests.support.clocks import MovedClock
from tests.support.redis_server import RedisServer
from tests.support.store import add, at_use, members, new_job, work
from tests.support.waiting import PATIENCE_S
from tests.support.waits import WAITS


@pytest.fixture
def settings(own_redis: RedisServer, settings: Settings) -> Settings:
    """A Redis that a test may fill, stop and hold."""
    return settings.replace(redis_url=own_redis.url)


@pytest.fixture
def raw(own_raw: redis_py.Redis) -> redis_py.Redis:
    return own_raw


@contextmanager
def silent(server: RedisServer) -> Iterator[None]:
    """Within the block, Redis takes connections and answers nothing."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def fill(raw: redis_py.Redis, most_bytes: int = 1) -> None:
    raw.config_set("maxmemory", most_bytes)


def said_to_wait(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The levels of what was logged of the wait for Redis."""
    return [each.levelno for each in caplog.records if ": waits. Redis at" in each.message]


def test_a_full_redis_lets_a_producer_keep_its_right_and_store_nothing(broker: Broker, raw: redis_py.Redis) -> None:
    job_id = new_job(broker, 1, seal=False)
    assert broker.jobs.hold(job_id, "p", lease_s=300)
    fill(raw)
    assert broker.jobs.hold(job_id, "p", lease_s=600)
    assert raw.ttl(keys.producer(job_id)) > 300
    assert not broker.jobs.hold(job_id, "another")
    with pytest.raises(BrokerFull, match=r"^Redis is full \(1 bytes\): discard old jobs"):
        add(broker, job_id, 1)
    raw.delete(keys.producer(job_id))
    with pytest.raises(BrokerFull):
        broker.jobs.hold(job_id, "p")
    fill(raw, 0)
    assert broker.jobs.status(job_id).chunks == 1


def test_a_full_redis_is_named_first(broker: Broker, raw: redis_py.Redis, settings: Settings) -> None:
    job_id = new_job(broker, 1)
    set_settings = {"EMBEDCTL_REDIS_URL": settings.redis_url}
    assert "Redis is full" not in CliRunner().invoke(main, ["status"], env=set_settings).output
    fill(raw)
    everything = CliRunner().invoke(main, ["status"], env=set_settings)
    of_job = CliRunner().invoke(main, ["status", job_id], env=set_settings)
    as_json = json.loads(CliRunner().invoke(main, ["status", "--json"], env=set_settings).output)
    fill(raw, 0)
    assert re.match(r"Redis is full, [\d,]+ of 1 bytes, and takes nothing more", everything.output)
    assert of_job.output.splitlines()[2].startswith("redis      Redis is full")
    assert of_job.output.count("Redis is full") == 1
    assert "start one" not in everything.output + of_job.output
    assert as_json["redis_full_bytes"][1] == 1


@pytest.mark.slow
def test_a_full_redis_calls_nobody_dead(broker: Broker, raw: redis_py.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer may have lost its right before Redis was full, and can't take it again."""
    monkeypatch.setattr(keys, "PRODUCER_LEASE_S", 1)
    job_id = new_job(broker, 1, seal=False)
    work(broker, job_id, 0)
    raw.delete(keys.producer(job_id))
    fill(raw)
    with pytest.raises(WaitTimeout):
        Job(job_id, broker).wait(3)  # three of the leases above
    fill(raw, 0)
    with pytest.raises(JobStalled):
        Job(job_id, broker).wait(PATIENCE_S)


#: Every call that takes a timeout and waits for a job.
CALLS: dict[str, Callable[[Job, Any], object]] = {
    **WAITS,
    "retry_failed": lambda job, timeout: job.retry_failed(timeout),
    "await retry_failed": lambda job, timeout: asyncio.run(AsyncJob(job).retry_failed(timeout)),
}


@pytest.mark.parametrize("timeout", [float("nan"), "3", -1, True])
def test_what_is_no_time_to_wait_is_refused_at_once(settings: Settings, broker: Broker, timeout: Any) -> None:
    job = Job(new_job(broker, 1), broker)
    for call in CALLS.values():
        with pytest.raises(SettingsError, match="timeout"):
            call(job, timeout)
    with pytest.raises(SettingsError, match="timeout"):
        enqueue_embeddings(["a"], timeout=timeout, settings=settings)
    with pytest.raises(SettingsError, match="timeout"):
        asyncio.run(aenqueue_embeddings(["a"], timeout=timeout, settings=settings))


@pytest.fixture
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its own timeout ends a wait for a Redis that is away."""
    monkeypatch.setattr("embedctl_config.retry.RETRY_S", math.inf)


@pytest.mark.usefixtures("endless_patience")
@pytest.mark.parametrize("call", CALLS)
def test_an_absent_redis_is_not_awaited_for_ever(own_redis: RedisServer, broker: Broker, call: str) -> None:
    job = Job(new_job(broker, 1), broker)
    own_redis.stop()
    with pytest.raises(WaitTimeout, match="can't be reached"):
        CALLS[call](job, 0.5)


@pytest.mark.in_redis
def test_a_full_redis_ends_in_time(settings: Settings, broker: Broker, raw: redis_py.Redis, clock: MovedClock) -> None:
    def texts() -> Iterator[str]:
        yield from ("a", "b", "c")
        fill(raw)
        yield "d"

    def progress(records: int, waiting_for: str) -> None:
        clock.move(1000 * (waiting_for == "Redis"))

    with pytest.raises(WaitTimeout, match=r"after 999 s: its submission waits for Redis\. .* is full"):
        enqueue_embeddings(texts(), chunk_size=1, timeout=999, progress=progress, settings=settings)
    [job_id] = members(raw, keys.JOBS)
    assert broker.jobs.status(job_id).state is JobState.CANCELLED


def test_a_submission_waits_for_a_redis_that_is_full_before_it_begins(
    settings: Settings, raw: redis_py.Redis, caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    fill(raw)
    with pytest.raises(WaitTimeout, match="is full"):
        enqueue_embeddings(["a"], timeout=999, progress=lambda *_: clock.move(1000), settings=settings)
    assert "the submission waits. Redis is full (1 bytes): discard old jobs" in caplog.text
    told: list[str] = []

    def progress(records: int, waiting_for: str) -> None:
        told.append(waiting_for)
        fill(raw, 0)

    assert enqueue_embeddings(["a"], progress=progress, settings=settings).status().records == 1
    assert told[0] == "Redis"


@pytest.mark.usefixtures("endless_patience")
@pytest.mark.parametrize("call", ["wait", "await wait"])
def test_that_a_job_waits_for_redis_is_logged_once(
    own_redis: RedisServer,
    broker: Broker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    clock: MovedClock,
    call: str,
) -> None:
    monkeypatch.setattr(notices, "AGAIN_AFTER_S", math.inf)
    job = Job(new_job(broker, 1), broker)
    own_redis.stop()
    at_use(3, broker.connection, lambda: clock.move(1000), monkeypatch)
    with pytest.raises(WaitTimeout):
        WAITS[call](job, 999)
    assert said_to_wait(caplog) == [logging.WARNING]


@pytest.mark.usefixtures("endless_patience")
@pytest.mark.parametrize(("connected", "call"), [(True, "wait"), (False, "await wait")])
def test_a_redis_that_hangs_holds_up_nobody_for_longer_than_a_sockets_time_out(
    own_redis: RedisServer, broker: Broker, monkeypatch: pytest.MonkeyPatch, connected: bool, call: str
) -> None:
    monkeypatch.setattr(connection, "_SOCKET_TIMEOUT_S", 1)
    hasty = Broker.connect(broker.settings)
    job = Job(new_job(broker, 1), hasty)
    if connected:
        job.status()
    reads, read = [], redis_py.connection.AbstractConnection.read_response

    def counted(self: redis_py.connection.AbstractConnection, *args: Any, **options: Any) -> Any:
        reads.append(self)
        return read(self, *args, **options)

    monkeypatch.setattr(redis_py.connection.AbstractConnection, "read_response", counted)
    with silent(own_redis), pytest.raises(WaitTimeout):
        WAITS[call](job, 0.5)
    assert len(reads) == 1  # each would take a socket's time-out
    hasty.close()


HANGS = """
import asyncio, sys, threading
from embedctl import AsyncJob, enqueue_embeddings
from embedctl.store import connection
from embedctl_config.settings import Settings
connection._SOCKET_TIMEOUT_S = 3600  # what waits for an answer waits for longer than the test
job = enqueue_embeddings(["a"], settings=Settings(redis_url=sys.argv[1]))
asked, client = threading.Event(), job._broker.connection.client
def noted():
    asked.set()
    return client()
async def main():
    waiting = asyncio.create_task(AsyncJob(job).wait())
    while job._broker.listener._reads is None:
        await asyncio.sleep(0.02)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    job._broker.connection.client = noted
    await asyncio.to_thread(asked.wait)
    waiting.cancel()
asyncio.run(main())
"""


def test_a_process_ends_although_redis_says_nothing(own_redis: RedisServer) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, own_redis.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        with silent(own_redis):
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
