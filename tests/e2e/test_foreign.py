"""What other programs and versions leave in queues, jobs and the environment: it does no harm to ours."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from embedctl import enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.here import Here
from tests.support.prepared import Put
from tests.support.redis_server import RedisServer, as_user
from tests.support.waiting import eventually
from tests.support.workers import StartWorker, WorkerProcess

QUEUE = "embed.dummy.dummy"
JOB = "20200101-000000-0000000000"
#: What a ticket of 60 KB may be inflated to (bytes).
INFLATED = 60 << 20

Envelope = dict[str, Any]


@pytest.fixture
def ticket(broker: Broker, raw: redis_py.Redis) -> Envelope:
    """A real ticket as it lies in its queue, taken out of it."""
    broker.tickets.send(QUEUE, JOB, [0])
    (message,) = raw.lrange(QUEUE, 0, -1)
    raw.delete(QUEUE)
    found = json.loads(message)
    assert isinstance(found, dict)
    return found


def body(*args: object, **facts: object) -> str:
    return base64.b64encode(json.dumps([args, facts, {}]).encode()).decode()


def peak_bytes(worker: WorkerProcess) -> int:
    found = re.search(r"VmHWM:\s+([0-9]+) kB", Path(f"/proc/{worker.pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def assert_dropped(worker: WorkerProcess, raw: redis_py.Redis, settings: Settings, messages: list[Envelope]) -> None:
    """The worker drops the entry, its memory hardly grows, and it encodes the tickets behind it."""
    enqueue_embeddings(["first"], settings=settings).wait(timeout=60)
    peak, logged = peak_bytes(worker), worker.log_file.stat().st_size
    for at, message in enumerate(messages):
        message["properties"]["delivery_tag"] = f"tag-{at}"
        raw.lpush(QUEUE, json.dumps(message))
    job = enqueue_embeddings(["one", "two"], settings=settings)
    assert job.wait(timeout=60).done == 2
    eventually(lambda: raw.llen(QUEUE) == 0 and raw.hlen("unacked") == 0)
    assert worker.process.poll() is None
    assert peak_bytes(worker) < peak + (20 << 20)
    assert worker.log_file.stat().st_size < logged + 1000 * (len(messages) + 4)


def test_a_large_or_compressed_ticket_is_dropped_before_it_is_read(
    settings: Settings, raw: redis_py.Redis, ticket: Envelope, start_worker: StartWorker
) -> None:
    squeezed = zlib.compress(b'[["' + b"a" * INFLATED + b'", 0], {}, {}]', 9)
    assert len(squeezed) < 70_000
    long = "x" * (1 << 20)
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"body": base64.b64encode(squeezed).decode()}, {"compression": "application/x-gzip"}),
        ({"body": body(long, 0)}, {}),
        ({"content-type": "application/x-python-serialize"}, {}),
        ({}, {"id": long}),
        ({}, {"task": "celery.accumulate"}),
        ({}, {"compression": {"no": "name"}}),
    ]
    messages = [
        json.loads(json.dumps({**ticket, **envelope, "headers": {**ticket["headers"], **headers}}))
        for envelope, headers in changes
    ]
    worker = start_worker()
    assert_dropped(worker, raw, settings, messages)
    assert worker.log().count("a message that is no ticket was dropped") >= len(messages) - 1


def test_what_a_ticket_names_is_checked_before_it_is_used_or_logged(
    settings: Settings, raw: redis_py.Redis, ticket: Envelope, start_worker: StartWorker
) -> None:
    odd: list[tuple[object, ...]] = [(), (JOB, 0, 0), ("\x1b]0;owned\x07\nforged", 0), (f"{JOB}:in:0", 0), (None, 0)]
    odd += [(JOB, chunk) for chunk in ("0", -1, 1.5, True, None, [0], 2**63)]
    messages = [{**json.loads(json.dumps(ticket)), "body": body(*args)} for args in odd]
    worker = start_worker()
    assert_dropped(worker, raw, settings, messages)
    assert worker.log().count("a ticket that names no chunk was dropped") == len(odd)
    assert "Traceback" not in worker.log()
    assert "forged" not in worker.log()
    assert not list(raw.scan_iter(match=f"{keys.job(JOB)}*"))


SUBMIT = """
import os
before = dict(os.environ)
from embedctl import enqueue_embeddings
job = enqueue_embeddings(["one", "two", "three"], chunk_size=1)
job.wait(timeout=60)
assert dict(os.environ) == before
print(job.status().state)
"""


#: What Celery and kombu read themselves, all meant for another program.
OTHERS = {
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
}
URLS = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")


def test_tickets_go_to_the_configured_redis_alone_and_a_program_keeps_its_environment(
    here: Here, own_redis: RedisServer
) -> None:
    elsewhere = f"redis+socket://{own_redis.folder}/redis.sock?virtual_host=0"
    here.environment.update({**OTHERS, **dict.fromkeys(URLS, elsewhere)})
    here.raw.config_resetstat()
    worker = here.start_worker()
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT],
        env=as_user(here.environment, "producer"),
        cwd=here.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("completed\n", 0), done.stderr + worker.log()
    commands = here.raw.info("commandstats")
    assert commands["cmdstat_lpush"]["calls"] >= 1
    assert commands["cmdstat_brpop"]["calls"] >= 1
    assert worker.process.poll() is None
    assert "django" not in (done.stderr + worker.log()).lower()
    with redis_py.Redis.from_url(own_redis.url) as other:
        assert not other.dbsize()
        assert len(other.client_list()) == 1


#: This version with another number.
OTHER = Put({("embedctl_config.wire", "VERSION"): 2})


@pytest.mark.in_redis
def test_a_job_of_another_version_is_left_alone_until_its_own_worker_comes(here: Here) -> None:
    def stored() -> dict[bytes, object]:
        return {key: here.raw.dump(key) for key in here.raw.scan_iter(f"embed:job:{job_id}*")}

    (here.folder / "corpus.txt").write_text("one\ntwo\n")
    job_id = here.embedctl("submit", "corpus.txt", prepare=OTHER).stdout.strip()
    before = stored()
    worker = here.start_worker()
    eventually(lambda: worker.logged("its ticket is of version 2, and this worker handles version 1", job=job_id))
    eventually(lambda: f"{job_id} can't be looked after" in worker.log())
    for verb in ("status", "wait", "cancel"):
        told = here.embedctl(verb, job_id, status=1)
        assert "is of version 2, and this embedctl handles version 1" in told.stderr
    assert stored() == before
    assert worker.stop() == 0
    here.start_worker(prepare=OTHER)
    assert here.embedctl("wait", job_id, prepare=OTHER).returncode == 0
