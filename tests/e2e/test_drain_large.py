"""A job that is larger than its Redis, while everything that takes part in it is killed at random moments."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import redis as redis_py

from tests.support.drained_parts import manifest_of, write_corpus
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

MAXMEMORY = 8 * 1024 * 1024


@pytest.fixture
def redis_server(own_redis: RedisServer) -> RedisServer:
    """A Redis of 8 MB."""
    own_redis.extra += ["--maxmemory", str(MAXMEMORY), "--maxmemory-policy", "noeviction"]
    own_redis.stop()
    own_redis.start()
    return own_redis


def assert_every_record_once(folder: Path, texts: list[str]) -> dict[int, str]:
    """Read the parts alone: every position once, with its vector or its error. Returns the errors' codes."""
    manifest_of(folder)
    seen = np.zeros(len(texts), np.int64)
    codes: dict[int, str] = {}
    for path in sorted(folder.glob("part-*.parquet")):
        table = pq.read_table(path, columns=["position", "embedding", "error_code"])
        seen[table["position"].to_numpy()] += 1
        failed = table.filter(table["error_code"].is_valid())
        codes |= dict(zip(failed["position"].to_pylist(), failed["error_code"].to_pylist(), strict=True))
        table = table.filter(table["error_code"].is_null())
        positions = table["position"].to_numpy()
        some = positions[:: max(1, len(positions) // 20)]
        vectors = np.array(table["embedding"].take(np.searchsorted(positions, some)).to_pylist(), np.float32)
        np.testing.assert_array_equal(vectors, reference([texts[position] for position in some]))
    assert seen.min() == seen.max() == 1
    return codes


@contextmanager
def highest_memory(server: RedisServer) -> Iterator[Callable[[], int]]:
    """The highest `used_memory` that was seen in the block."""
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        with redis_py.Redis.from_url(server.url) as client:
            while not over.wait(0.02):  # the others need the CPU too
                most = max(most, client.info("memory")["used_memory"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield lambda: most
    over.set()
    watcher.join()


SMALL = {"LIMIT_HIGH_WATER_BYTES": "1000000", "EMBEDCTL_LEASE_S": "2"}


def test_150_000_records_go_through_8_mb(here: Here, redis_server: RedisServer) -> None:
    """All results together take some 10 MB, and the texts as much again."""
    texts = write_corpus(here.folder, 150_000)
    here.start_worker()
    log = here.folder / "submit.log"
    with highest_memory(redis_server) as used:
        arguments = ["submit", "c.jsonl", "-o", "out/", "-q"]
        submitter = Forked(arguments, {**here.environment, **SMALL}, here.folder, log, log)
        assert submitter.wait(150) == 0, log.read_text()
        assert used() < MAXMEMORY
    assert not assert_every_record_once(here.folder / "out", texts)


@pytest.mark.timeout(400)
def test_nothing_is_lost_or_doubled_whatever_is_killed(here: Here, redis_server: RedisServer) -> None:
    """A drainer is killed at 8 random moments, Redis at 3 and a worker at 4."""
    texts = write_corpus(here.folder, 120_000)
    rng = random.Random(22)
    own = {**here.environment, **SMALL}
    log = here.folder / "commands.log"
    key = ["--resume", "k", "--chunk-size", "100", "--drain", "-q"]
    workers = [here.start_worker() for _ in range(2)]
    submitter = Forked(["submit", "c.jsonl", *key], own, here.folder, log, log)
    with redis_py.Redis.from_url(redis_server.url) as client:
        eventually(lambda: client.zcard("embed:jobs"), what="the job", show=log.read_text)
        ids = [name.decode() for name in client.zrange("embed:jobs", 0, -1)]

    def drainer() -> Forked:
        arguments = ["fetch", ids[0], "-o", "out/", "-q"]
        return Forked(arguments, own, here.folder, log, log)

    draining = drainer()
    for what in rng.sample(["drainer"] * 8 + ["redis"] * 3 + ["worker"] * 4, 15):
        time.sleep(rng.uniform(0.1, 0.8))  # a random moment
        if what == "drainer":
            draining.kill()
            draining.wait(120)
            draining = drainer()
        elif what == "redis":
            assert redis_server.process is not None
            redis_server.process.send_signal(signal.SIGKILL)
            redis_server.process.wait()
            redis_server.start()
        else:
            at = rng.randrange(2)
            workers[at].kill()
            workers[at] = here.start_worker(wait=False)
    status = draining.wait(200)
    assert submitter.wait(60) == 0, log.read_text()
    codes = assert_every_record_once(here.folder / "out", texts)
    # A kill that hits a worker in the middle of a suspect chunk makes the record at hand look guilty.
    assert set(codes.values()) <= {"crashed_worker"}
    assert len(codes) <= 5
    assert status == (3 if codes else 0), log.read_text()
