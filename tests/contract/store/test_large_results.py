"""Results of many MiB: in parts, over slow networks and broken ones, and never larger than Redis takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from redis import Redis

from embedctl import enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.store import Added, Completed, jobs
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerRefused, BrokerUnavailable, SettingsError
from embedctl_config.retry import Policy
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer
from tests.support.rig import Rig
from tests.support.store import MINE, OPTIONS, claim, new_job, payload, row, some, spec
from tests.support.waiting import PATIENCE_S, eventually

MIB = 1024 * 1024
REPORT = Completed(2, 0, 0, tokens=10, work=10, dim=3)


def complete(broker: Broker, job_id: str, data: bytes, chunk: int = 0) -> str:
    return broker.jobs.complete(job_id, chunk, f"t{chunk}", data, REPORT, fingerprint=MINE)


def some_result(size: int, chunk: int = 0, *, of: bytes | None = None) -> bytes:
    """Bytes that nobody decodes; a result's digest of its text stands in them where scripts read it."""
    first, last = wire.DIGEST_RANGE
    data = bytearray(os.urandom(size))
    data[first : last + 1] = wire.digest_of(of or payload(chunk))
    return bytes(data)


def claimed(broker: Broker, chunks: int = 1) -> str:
    job_id = new_job(broker, chunks)
    for chunk in range(chunks):
        assert claim(broker, job_id, chunk, f"t{chunk}") is not None
    return job_id


@pytest.fixture
def behind(proxy: Proxy, settings: Settings) -> Iterator[Broker]:
    broker = Broker.connect(settings.replace(redis_url=proxy.url))
    yield broker
    broker.close()


@pytest.mark.parametrize("size", [100, MIB])
def test_a_result_of_one_part_takes_two_commands_as_ever(broker: Broker, raw: Redis, size: int) -> None:
    job_id = claimed(broker, 2)
    assert complete(broker, job_id, some_result(size)) == "ok"  # the script is known from here on
    raw.config_resetstat()
    assert complete(broker, job_id, some_result(size, 1), 1) == "ok"
    stats = raw.info("commandstats")
    assert (stats["cmdstat_set"]["calls"], stats["cmdstat_evalsha"]["calls"]) == (1, 1)
    assert "cmdstat_append" not in stats


@pytest.mark.parametrize("size", [MIB + 1, 3 * MIB, 5 * MIB + 77])
def test_a_larger_one_is_stored_as_it_is(broker: Broker, raw: Redis, size: int) -> None:
    job_id, data = claimed(broker), some_result(size)
    assert complete(broker, job_id, data) == "ok"
    assert broker.jobs.result(job_id, 0) == data
    assert raw.ttl(keys.chunk_result(job_id, 0)) > keys.UNCOMMITTED_TTL_S
    assert not raw.exists(keys.uncommitted_result(job_id, 0, "t0"))


def test_only_what_is_missing_is_sent_again(behind: Broker, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, data = claimed(behind), some_result(8 * MIB)
    script, parts = behind.connection.script, []

    def failing(name: str, *args: Any) -> tuple[str, list[Any]]:
        parts.append(name)
        if parts.count("part") == 7:  # the question and five parts have come
            raise BrokerUnavailable("away")
        return script(name, *args)

    monkeypatch.setattr(behind.connection, "script", failing)
    with pytest.raises(BrokerUnavailable):
        complete(behind, job_id, data)
    before, _ = proxy.carried
    assert complete(behind, job_id, data) == "ok"
    after, _ = proxy.carried
    assert 3 * MIB < after - before < 4 * MIB
    assert behind.jobs.result(job_id, 0) == data


@pytest.mark.parametrize("left", [0, MIB, 2 * MIB + 5])
def test_lost_parts_are_sent_anew(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    job_id, data = claimed(broker), some_result(6 * MIB)
    temporary, script = keys.uncommitted_result(job_id, 0, "t0"), broker.connection.script
    lost = []

    def losing(name: str, *args: Any) -> tuple[str, list[Any]]:
        if name not in lost and (raw.strlen(temporary) == 4 * MIB or name == "complete"):
            lost.append(name)
            raw.set(temporary, data[:left]) if left else raw.delete(temporary)
        return script(name, *args)

    monkeypatch.setattr(broker.connection, "script", losing)
    assert complete(broker, job_id, data) == "ok"
    assert lost == ["part", "complete"]
    assert broker.jobs.result(job_id, 0) == data


def test_a_part_whose_answer_was_lost_is_there_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, data = claimed(broker), some_result(4 * MIB)
    script = broker.connection.script

    def twice(name: str, *args: Any) -> tuple[str, list[Any]]:
        script(name, *args)
        return script(name, *args)

    monkeypatch.setattr(
        broker.connection, "script", lambda name, *args: (twice if name == "part" else script)(name, *args)
    )
    assert complete(broker, job_id, data) == "ok"
    assert broker.jobs.result(job_id, 0) == data


def test_parts_of_a_cancelled_job_are_not_sent(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, script, sent = claimed(broker), broker.connection.script, []

    def cancelling(name: str, *args: Any) -> tuple[str, list[Any]]:
        sent.append(name)
        if name == "part" and sent.count("part") == 3:
            broker.jobs.cancel(job_id)
        return script(name, *args)

    monkeypatch.setattr(broker.connection, "script", cancelling)
    assert complete(broker, job_id, bytes(20 * MIB)) == "cancelled"
    assert sent.count("part") == 3
    assert not raw.exists(keys.uncommitted_result(job_id, 0, "t0"))


def test_a_result_that_no_value_can_hold_is_refused(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_RESULT_BYTES", 100)
    with pytest.raises(BrokerRefused, match="smaller chunk_size"):
        complete(broker, claimed(broker), bytes(100))


def test_chunks_whose_vectors_are_too_large_are_refused_if_known(broker: Broker, settings: Settings) -> None:
    with pytest.raises(SettingsError, match=r"chunk_size 16384: .* 8192 dimensions .* largest chunk_size is 14336"):
        enqueue_embeddings(["text"], chunk_size=16384, dimensions=8192, settings=settings)
    enqueue_embeddings(["text"], chunk_size=14336, dimensions=8192, settings=settings)
    enqueue_embeddings(["text"], chunk_size=16384, settings=settings)  # nobody knows
    broker.workers.beat(row())
    enqueue_embeddings(["text"], chunk_size=16384, settings=settings)  # of three dimensions each


def test_a_result_may_never_arrive(broker: Broker, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(broker, settings, DummyBackend(dim=16))
    job = rig.submit()

    monkeypatch.setattr(broker.jobs, "complete", Mock(side_effect=BrokerUnavailable("Timeout writing to socket")))
    monkeypatch.setattr("embedctl_workers.serving.chunk_store.REDIS", Policy(0.1, 0.1))
    with rig.in_thread() as thread:
        eventually(lambda: not thread.is_alive())
        assert "did not take it 8 times" in (job.status().trouble or "")


def test_a_result_is_held_in_an_outage(broker: Broker, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(broker, settings, DummyBackend(dim=16))
    job = rig.submit()
    complete, away = broker.jobs.complete, Mock(side_effect=BrokerUnavailable("can't be reached"))
    monkeypatch.setattr(broker.jobs, "complete", away)
    monkeypatch.setattr(broker.jobs, "renew", away)
    monkeypatch.setattr("embedctl_workers.serving.chunk_store.REDIS", Policy(0.01, 0.01))
    with rig.in_thread() as thread:
        eventually(lambda: away.call_count > 60)
        monkeypatch.setattr(broker.jobs, "complete", complete)
        thread.join(PATIENCE_S)
        assert job.status().done == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_network_takes_a_large_result_and_a_large_text(redis_server: RedisServer, settings: Settings) -> None:
    slow = Proxy(Path(redis_server.folder / "redis.sock"), rate=1e6, delay_s=0.02)
    slow.start()
    broker = Broker.connect(settings.replace(redis_url=slow.url))
    try:
        text = wire.encode_input(wire.ChunkInput(0, bytes(1), [os.urandom(11 * MIB)]))
        new_job(broker)  # Redis knows the script from here on
        job_id, _ = broker.jobs.create(spec(options={**OPTIONS}))
        added = broker.jobs.add(job_id, 0, text, digest=wire.digest_of(text), rows=1, token="p")
        assert added == (Added.OK, len(text))
        broker.jobs.seal(job_id, 1)
        given = some(claim(broker, job_id, 0, "t0"))
        assert given.input == text
        data, began = some_result(12 * MIB, of=text), time.monotonic()
        assert complete(broker, job_id, data) == "ok"
        assert time.monotonic() - began > 10  # longer than a socket waits
        assert broker.jobs.result(job_id, 0) == data
        assert slow.carried[0] < 1.1 * (len(text) + len(data))  # nothing was sent twice
    finally:
        broker.close()
        slow.stop()


def test_texts_and_scripts_go_in_pieces_as_they_are(broker: Broker) -> None:
    job_id = new_job(broker, 0, seal=False)
    large = wire.encode_input(wire.ChunkInput(0, bytes(1), [os.urandom(3 * MIB)]))
    assert broker.jobs.add(job_id, 0, large, digest=wire.digest_of(large), rows=1, token="p")[0] is Added.OK
    assert broker.jobs.input(job_id, 0) == large
    assert len(payload(0)) < 1000
