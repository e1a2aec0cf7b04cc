"""What other programs and versions leave in queues, jobs and the environment: it does no harm to ours."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from string import Template
from typing import Any

import pytest
import redis as redis_py
from celery import Celery
from kombu import Exchange, Queue

from embedctl import enqueue_embeddings
from embedctl.store import scripts
from embedctl.store.scripts import BELL
from embedctl_config import keys
from embedctl_config.celery_app import make_celery
from tests.support.here import Here
from tests.support.prepared import Put
from tests.support.redis_server import RedisServer, as_user
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

QUEUE = "embed.dummy.dummy"
#: What a message of 60 KB may be inflated to (bytes).
INFLATED = 60 << 20

Envelope = dict[str, Any]


def bell(tag: str = "tag", headers: Envelope | None = None, delivery: object = None, **envelope: object) -> Envelope:
    """A bell as it lies in its queue, with these headers and parts in place of its own."""
    found: Envelope = json.loads(Template(BELL).substitute(id=tag, queue=QUEUE))
    found["headers"].update(headers or {})
    if delivery is not None:
        found["properties"]["delivery_info"] = delivery
    return {**found, **envelope}


def body(*args: object) -> str:
    return base64.b64encode(json.dumps([args, {}, {}]).encode()).decode()


def peak_bytes(worker: WorkerProcess) -> int:
    found = re.search(r"VmHWM:\s+([0-9]+) kB", Path(f"/proc/{worker.pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_a_message_that_is_no_bell_is_dropped_unread_and_nothing_that_it_says_is_used_or_logged(here: Here) -> None:
    """The worker's memory hardly grows, and it hears the bells behind it."""
    squeezed = zlib.compress(b'[["' + b"a" * INFLATED + b'", 0], {}, {}]', 9)
    assert len(squeezed) < 70_000
    long, forged = "x" * (1 << 20), "\x1b]0;owned\x07\nforged"
    elsewhere = [{"exchange": "", "routing_key": key} for key in (forged, "embed.slow.dummy", None, [QUEUE])]
    no_bells = [
        bell(headers={"compression": "application/x-gzip"}, body=base64.b64encode(squeezed).decode()),
        bell(body=body(long)),
        {**bell(), "content-type": "application/x-python-serialize"},
        bell(headers={"id": long}),
        bell(headers={"task": "celery.accumulate"}),
        bell(headers={"compression": {"no": "name"}}),
        *(bell(delivery=each) for each in elsewhere),
    ]
    worker = here.start_worker()
    enqueue_embeddings(["first"], settings=here.settings).wait(timeout=60)
    peak, logged = peak_bytes(worker), worker.log_file.stat().st_size
    for at, message in enumerate([*no_bells, bell(body=body(forged, 0))]):
        message["properties"]["delivery_tag"] = f"tag-{at}"
        here.raw.lpush(QUEUE, json.dumps(message))
    job = enqueue_embeddings(["one", "two"], settings=here.settings)
    assert job.wait(timeout=60).done == 2
    eventually(lambda: here.raw.llen(QUEUE) == 0 and here.raw.hlen(keys.UNACKED) == 0)
    assert worker.process.poll() is None
    assert peak_bytes(worker) < peak + (20 << 20)
    assert worker.log_file.stat().st_size < logged + 1000 * (len(no_bells) + 5)
    assert worker.log().count("a message that is no bell was dropped") >= len(no_bells) - 1
    assert worker.log().count("Traceback") <= 1  # Celery's own, of what it refuses to deserialise
    assert "forged" not in worker.log()


@pytest.mark.slow
def test_another_application_keeps_what_it_has_not_acknowledged(here: Here) -> None:
    """It has Celery's usual keys in the same database. Its two tasks last for longer than an hour."""
    url = make_celery(here.settings).conf.broker_url
    hour_ago = time.time() - 3700
    with Celery("reports", broker=url).connection_for_read() as connection:
        mails = Queue("mails", Exchange("mails", type="topic"), routing_key="mail.#")
        with connection.SimpleQueue("reports") as reports, connection.SimpleQueue(mails) as others:  # type: ignore[arg-type]  # it takes queues too
            reports.put("a report")
            others.producer.publish("a mail", exchange="mails", routing_key="mail.monthly")
            tasks = [reports.get(), others.get()]
            for tag in here.raw.zrange("unacked_index", 0, -1):
                here.raw.zadd("unacked_index", {str(tag, "ascii"): hour_ago})  # type: ignore[arg-type]  # it is bytes
            before = here.raw.hgetall("unacked"), here.raw.zrange("unacked_index", 0, -1, withscores=True)
            assert len(before[0]) == 2

            for text in ("one", "two"):
                # A bell that a worker took long ago: once it is gone, kombu has looked after what was lost.
                here.raw.hset(keys.UNACKED, "lost", json.dumps([bell("lost"), "", QUEUE]))
                here.raw.zadd(keys.UNACKED_INDEX, {"lost": hour_ago})
                worker = here.start_worker()
                eventually(lambda: not here.raw.hexists(keys.UNACKED, "lost"))
                enqueue_embeddings([text], settings=here.settings).wait(timeout=60)
                worker.kill()
            assert (here.raw.hgetall("unacked"), here.raw.zrange("unacked_index", 0, -1, withscores=True)) == before
            assert here.raw.llen("reports") == here.raw.llen("mails") == 0
            for task in tasks:
                task.ack()
            assert not here.raw.exists("unacked")


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


def test_bells_come_from_our_redis_alone_and_a_program_keeps_its_variables(here: Here, own_redis: RedisServer) -> None:
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
OTHER = Put(
    {
        ("embedctl_config.wire", "VERSION"): 2,
        ("embedctl.store.scripts", "CONSTANTS"): {**scripts.CONSTANTS, "WIRE_VERSION": 2},
    }
)


@pytest.mark.in_redis
def test_a_job_of_another_version_is_left_alone_until_its_own_worker_comes(here: Here) -> None:
    def stored() -> dict[bytes, object]:
        return {key: here.raw.dump(key) for key in here.raw.scan_iter(f"embed:job:{job_id}*")}

    (here.folder / "corpus.txt").write_text("one\ntwo\n")
    job_id = here.embedctl("submit", "corpus.txt", prepare=OTHER).stdout.strip()
    before = stored()
    worker = here.start_worker()
    eventually(lambda: f"{job_id} can't be looked after" in worker.log())
    for verb in ("status", "wait", "cancel"):
        told = here.embedctl(verb, job_id, status=1)
        assert "is of version 2, and this embedctl handles version 1" in told.stderr
    assert stored() == before
    here.start_worker(prepare=OTHER)
    eventually(lambda: here.raw.hget(keys.job(job_id), "state") == b"completed", 30)  # beside the other one
    assert worker.process.poll() is None
