"""Environment variables meant for another program that uses Celery have no effect on embedctl."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_py

from embedctl_config import keys
from tests.support.dashboard import dashboard
from tests.support.redis_server import RedisServer, as_user
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

QUEUE = keys.queue("dummy", "dummy")
SUBMIT = """
import os
before = dict(os.environ)
from embedctl import enqueue_embeddings
job = enqueue_embeddings(["one", "two", "three"], chunk_size=1)
job.wait(timeout=60)
assert dict(os.environ) == before
print(job.status().state)
"""


def variables_of_others(other: str) -> dict[str, str]:
    """The variables that Celery, kombu and Flower read themselves, all pointing elsewhere."""
    return {
        "CELERY_BROKER_URL": other,
        "CELERY_BROKER_READ_URL": other,
        "CELERY_BROKER_WRITE_URL": other,
        "CELERY_RESULT_BACKEND": "no_such_backend://",
        "CELERY_LOADER": "no.such.module:Loader",
        "CELERY_CONFIG_MODULE": "no_such_configuration",
        "CELERY_CUSTOM_WORKER_POOL": "no.such.module:Pool",
        "CELERY_LOG_LEVEL": "10",
        "CELERY_TRACE_APP": "1",
        "C_FORCE_ROOT": "1",
        "C_STRICT_APP": "1",
        "C_WNOCONF": "1",
        "DJANGO_SETTINGS_MODULE": "no_such_site.settings",
        "FORKED_BY_MULTIPROCESSING": "1",
        "KOMBU_DISABLE_LIMIT_PROTECTION": "1",
        "FLOWER_BROKER_API": other,
        "FLOWER_PORT": "1",
        "FLOWER_BASIC_AUTH": "somebody:else",
    }


@pytest.fixture
def other(own_redis: RedisServer) -> Iterator[redis_py.Redis]:
    """The Redis of another program: its clients and its keys."""
    client = redis_py.Redis.from_url(own_redis.url)
    client.config_resetstat()
    yield client
    client.close()


def untouched(other: redis_py.Redis) -> bool:
    return (
        not other.dbsize() and len(other.client_list()) == 1 and other.info("stats")["total_connections_received"] <= 1
    )


def test_tickets_go_to_the_configured_redis_alone_and_a_program_keeps_its_environment(
    own_redis: RedisServer,
    other: redis_py.Redis,
    environment: dict[str, str],
    start_worker: StartWorker,
    short_folder: Path,
    raw: redis_py.Redis,
) -> None:
    environment.update(variables_of_others(f"redis+socket://{own_redis.folder}/redis.sock?virtual_host=0"))
    raw.config_resetstat()
    worker = start_worker()
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT],
        env=as_user(environment, "producer"),
        cwd=short_folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("completed\n", 0), done.stderr + worker.log()
    commands = raw.info("commandstats")
    assert commands["cmdstat_lpush"]["calls"] >= 1
    assert commands["cmdstat_brpop"]["calls"] >= 1
    assert worker.process.poll() is None
    assert "django" not in (done.stderr + worker.log()).lower()
    assert untouched(other)


@pytest.mark.slow
def test_the_dashboard_shows_the_redis_that_is_configured(
    own_redis: RedisServer,
    other: redis_py.Redis,
    environment: dict[str, str],
    start_worker: StartWorker,
    short_folder: Path,
) -> None:
    worker = start_worker().wait_ready()
    environment.update(variables_of_others(f"redis+socket://{own_redis.folder}/redis.sock?virtual_host=0"))
    with dashboard(environment, short_folder) as flower:
        eventually(lambda: worker.row().name in flower.ask("/api/workers?refresh=1"))
        assert str(own_redis.folder) not in flower.get("/broker")[1]
        assert QUEUE in flower.get("/api/queues/length")[1]
        assert untouched(other)
