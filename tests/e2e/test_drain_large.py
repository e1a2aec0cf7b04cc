"""A job that is larger than its Redis."""

from __future__ import annotations

import threading
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

pytestmark = pytest.mark.slow

MAXMEMORY = 8 * 1024 * 1024


@pytest.fixture
def redis_server(own_redis: RedisServer) -> RedisServer:
    """A Redis of 8 MB."""
    own_redis.extra += ["--maxmemory", str(MAXMEMORY), "--maxmemory-policy", "noeviction"]
    own_redis.stop()
    own_redis.start()
    return own_redis


def assert_every_record_once(folder: Path, texts: list[str]) -> None:
    """Read the parts alone: every position once, with its vector."""
    manifest_of(folder)
    seen = np.zeros(len(texts), np.int64)
    for path in sorted(folder.glob("part-*.parquet")):
        table = pq.read_table(path, columns=["position", "embedding"])
        seen[table["position"].to_numpy()] += 1
        positions = table["position"].to_numpy()
        some = positions[:: max(1, len(positions) // 20)]
        vectors = np.array(table["embedding"].take(np.searchsorted(positions, some)).to_pylist(), np.float32)
        np.testing.assert_array_equal(vectors, reference([texts[position] for position in some]))
    assert seen.min() == seen.max() == 1


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
    assert_every_record_once(here.folder / "out", texts)
