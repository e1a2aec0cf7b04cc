"""A newcomer's use of the command line beyond submit and fetch, and the errors they may meet."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial

import numpy as np
import redis as redis_py

from embedctl import JobState, enqueue_embeddings
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.jobs import active_job_id, reference
from tests.support.redis_server import RedisServer
from tests.support.store import active_jobs
from tests.support.waiting import eventually


def test_bad_lines_are_named_before_anything_is_queued_or_left_out(here: Here) -> None:
    lines = ['{"text": "one"}', "nonsense", '{"body": "two"}', "[1]", '{"text": "three"}']
    (here.folder / "c.jsonl").write_text("\n".join(lines))
    stopped = here.embedctl("submit", "c.jsonl", status=2)
    assert stopped.stderr.startswith("embedctl: 3 lines are bad, and nothing is queued. To leave such lines out, give")
    assert "\n  c.jsonl, line 2: not JSON" in stopped.stderr
    assert not list(here.raw.scan_iter("embed:*"))

    here.start_worker()
    skipped = here.embedctl("submit", "c.jsonl", "--skip-bad-lines", "-o", "out.npy", status=0)
    assert "skipped before record 1: c.jsonl, line 3: no field 'text'; fields seen: body" in skipped.stderr
    assert "skipped 3 bad lines; positions count the records that are left\n" in skipped.stderr
    assert skipped.stderr.endswith("\n5 read = 2 vectors + 0 failed + 3 bad lines\n")
    queued = here.embedctl("submit", "c.jsonl", "--skip-bad-lines", "--class", "half", status=0)
    assert "5 read = 2 queued + 3 bad lines\n" in queued.stderr
    np.testing.assert_array_equal(np.load(here.folder / "out.npy"), reference(["one", "three"]))


def test_interrupting_a_submission_cancels_it_and_interrupting_a_wait_does_not(here: Here) -> None:
    def reading() -> set[str]:
        return {client["id"] for client in here.raw.client_list() if client["cmd"] == "xread"}

    def another_reads(known: set[str]) -> bool:
        return bool(reading() - known)

    # Shells show 130 for both: Python ends itself by the signal where that came while it ran code from a string, as
    # `dataclass` does, whatever became of the exception.
    interrupted = (130, -signal.SIGINT)
    command = [sys.executable, "-m", "embedctl", "submit", "-", "--format", "txt", "--chunk-size", "1"]
    pipe = subprocess.PIPE
    submitting = subprocess.Popen(
        command, env=here.environment, cwd=here.folder, stdin=pipe, stderr=pipe, stdout=pipe, text=True
    )
    assert submitting.stdin
    submitting.stdin.write("one\ntwo\n")
    submitting.stdin.flush()
    eventually(lambda: list(active_jobs(here.broker)))
    job_id = active_job_id(here.broker)
    eventually(lambda: here.broker.jobs.status(job_id).chunks)  # it reads records
    submitting.send_signal(signal.SIGINT)
    _, told = submitting.communicate(timeout=60)
    assert submitting.returncode in interrupted, told
    assert "cancelled" in told
    assert here.broker.jobs.status(job_id).state is JobState.CANCELLED

    job = enqueue_embeddings(["text"], settings=here.settings)
    for verb in (["wait", job.id], ["fetch", job.id, "-o", "out.npy"]):
        known = reading()  # the connection of the command before may still stand in the list
        waiting = Forked(verb, here.environment, here.folder)
        eventually(partial(another_reads, known))
        waiting.send_signal(signal.SIGINT)
        _, told = waiting.communicate(timeout=60)
        assert waiting.returncode in interrupted, told
        assert f"job {job.id} goes on" in told
    assert job.status().state is JobState.QUEUED


def test_doctor_finds_what_is_wrong_and_says_what_to_do(here: Here, own_redis: RedisServer) -> None:
    healthy = here.embedctl("doctor", status=0)
    assert "maxmemory below 60%" in healthy.stdout
    assert "embedctl worker --class cpu" in healthy.stdout
    here.environment["EMBEDCTL_REDIS_URL"] = own_redis.url
    with redis_py.Redis.from_url(own_redis.url) as admin:
        for name, value in {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru", "appendonly": "no"}.items():
            admin.config_set(name, value)
    sick = here.embedctl("doctor", status=1)
    assert "maxmemory-policy noeviction" in sick.stdout
    assert "appendonly yes" in sick.stdout
    (here.folder / "c.txt").write_text("text\n")
    assert "evicts keys" in here.embedctl("submit", "c.txt", status=69).stderr
