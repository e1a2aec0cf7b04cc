"""A real `embedctl metrics`: what it serves to a Prometheus, and what while Redis is away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedctl import enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.monitor import Monitor, running_monitor
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import StartWorker


@pytest.fixture
def redis_server(own_redis: RedisServer) -> RedisServer:
    """A Redis of the test's own: one of these stops it."""
    return own_redis


@pytest.fixture
def monitor(environment: dict[str, str], short_folder: Path) -> Iterator[Monitor]:
    with running_monitor(environment, short_folder) as monitor:
        yield monitor


@pytest.mark.slow
def test_a_prometheus_sees_all_that_waits_and_not_the_window(
    settings: Settings, monitor: Monitor, start_worker: StartWorker
) -> None:
    texts = ["word " * 20] * 400
    job = enqueue_embeddings(texts, chunk_size=2, settings=settings)
    queue = ("dummy", "dummy", "normal")
    eventually(lambda: monitor.metrics().get(("waiting_chunks", *queue)) == 200)
    found = monitor.metrics()
    assert monitor.ready
    assert monitor.get("/healthz") == (200, "ok\n")
    waiting = job.status().waiting_bytes
    assert found["waiting_bytes", *queue] == found["tenant_waiting_bytes", "default"] == waiting
    assert found["waiting_tokens", *queue] == pytest.approx(waiting / 4.2)
    assert found["jobs_active", *queue] == found["tenant_jobs_active", "default"] == found["redis_up",] == 1
    assert found["jobs_unreadable",] == 0
    assert found["oldest_waiting_seconds", *queue] >= found["longest_standstill_seconds", *queue] > 0
    assert found["backlog_age_seconds",] >= 0
    assert not [name for name in found if name[0] == "workers_alive"]

    start_worker()
    job.wait(timeout=120)
    eventually(lambda: monitor.metrics().get(("workers_alive", "dummy", "dummy")) == 1)
    eventually(lambda: ("waiting_chunks", *queue) not in monitor.metrics())
    assert monitor.stop() == 0


def test_while_redis_is_away_it_is_well_and_not_ready_and_tells_no_old_figures(
    own_redis: RedisServer, environment: dict[str, str], short_folder: Path
) -> None:
    own_redis.stop()
    with running_monitor(environment, short_folder) as monitor:
        eventually(lambda: monitor.get("/readyz")[0] == 503)
        assert monitor.get("/healthz")[0] == 200
        found = {name[0]: value for name, value in monitor.metrics().items()}
        assert found == {"build_info": 1, "redis_up": 0}
        own_redis.start()
        eventually(lambda: monitor.ready)
        assert monitor.metrics()["redis_up",] == 1
        assert monitor.stop(signal.SIGINT) == 130
