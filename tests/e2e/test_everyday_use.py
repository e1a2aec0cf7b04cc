"""A newcomer's use of the command line beyond submit and fetch, and the errors they may meet."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from embedctl import JobState, JobUnfinished, enqueue_embeddings
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.jobs import active_job_id, reference
from tests.support.redis_server import RedisServer
from tests.support.store import active_jobs
from tests.support.waiting import eventually


def test_failed_records_are_retried_in_their_places(here: Here) -> None:
    config = Path(here.environment["EMBEDCTL_CONFIG"])
    good = config.read_text()
    config.write_text(good.replace("{dim = 16}", "{dim = 16, poison = true}"))
    failing = here.start_worker()
    texts = [f"text {i}" + (" fail-encoder" if i in (3, 4, 17) else "") for i in range(30)]
    texts[9] = ""
    job = enqueue_embeddings(texts, chunk_size=10, settings=here.settings)
    assert job.wait(timeout=60).failed == 4
    assert [(e.position, e.code) for e in job.errors()] == [
        (3, "encode_error"),
        (4, "encode_error"),
        (9, "empty"),
        (17, "encode_error"),
    ]
    failing.stop()
    config.write_text(good)
    assert "4 records queued again" in here.embedctl("retry", job.id).stderr
    with pytest.raises(JobUnfinished):
        job.vectors()
    here.start_worker()
    status = job.wait(timeout=60)
    assert status.state is JobState.COMPLETED_WITH_ERRORS
    assert (status.records, status.done, status.failed) == (30, 29, 1)
    assert [(e.position, e.code) for e in job.errors()] == [(9, "empty")]
    others = [i for i in range(30) if i != 9]
    np.testing.assert_array_equal(job.vectors()[others], reference([texts[i] for i in others]))
    assert [p for chunk in job.iter_results() for p in chunk.positions] == list(range(30))


def test_an_error_budget_ends_a_hopeless_job(here: Here) -> None:
    here.start_worker()
    (here.folder / "c.txt").write_text("\n" * 40 + "text\n" * 400)
    share = here.embedctl("submit", "c.txt", "--wait", "--chunk-size", "10", "--max-errors", "5%")
    assert share.returncode == 1
    job_id = share.stdout.strip()
    assert "ended by max_errors" in here.embedctl("status", job_id).stdout
    assert len(here.embedctl("errors", job_id).stdout.splitlines()) >= 20
    refused = here.embedctl("fetch", job_id, "-o", "out.npy")
    assert refused.returncode == 1
    assert "error budget" in refused.stderr
    eventually(lambda: not list(here.raw.scan_iter(f"embed:job:{job_id}:in:*")))


def test_bad_lines_are_named_before_anything_is_queued_or_left_out(here: Here) -> None:
    lines = ['{"text": "one"}', "nonsense", '{"body": "two"}', "[1]", '{"text": "three"}']
    (here.folder / "c.jsonl").write_text("\n".join(lines))
    stopped = here.embedctl("submit", "c.jsonl")
    assert stopped.returncode == 2
    assert stopped.stderr.startswith("embedctl: 3 lines are bad, and nothing is queued. To leave such lines out, give")
    assert "\n  c.jsonl, line 2: not JSON" in stopped.stderr
    assert not list(here.raw.scan_iter("embed:*"))

    here.start_worker()
    skipped = here.embedctl("submit", "c.jsonl", "--skip-bad-lines", "-o", "out.npy")
    assert skipped.returncode == 0, skipped.stderr
    assert "skipped before record 1: c.jsonl, line 3: no field 'text'; fields seen: body" in skipped.stderr
    assert "skipped 3 bad lines; positions count the records that are left\n" in skipped.stderr
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


def test_list_wait_and_unknown_jobs(here: Here) -> None:
    job = enqueue_embeddings(["text"], settings=here.settings)
    assert [line.split()[0] for line in here.embedctl("list").stdout.splitlines()] == ["JOB", job.id]
    late = here.embedctl("wait", job.id, "--timeout", "0.2")
    assert late.returncode == 124
    assert "embedctl worker --class dummy --model dummy" in late.stderr
    here.start_worker()
    assert here.embedctl("wait", job.id).returncode == 0
    for verb in (["wait"], ["fetch", "-o", "x.npy"]):
        unknown = here.embedctl(*verb, "20200101-000000-0000000000")
        assert unknown.returncode == 4
        assert "lost by the broker" in unknown.stderr


def test_doctor_finds_what_is_wrong_and_says_what_to_do(here: Here) -> None:
    healthy = here.embedctl("doctor")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "maxmemory below 60%" in healthy.stdout
    assert "embedctl worker --class cpu" in healthy.stdout

    folder = here.folder / "own"
    folder.mkdir()
    server = RedisServer(
        folder, extra=["--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no"]
    )
    server.start()
    try:
        sick = here.embedctl("doctor", EMBEDCTL_REDIS_URL=server.url)
        assert sick.returncode == 1
        assert "maxmemory-policy noeviction" in sick.stdout
        assert "appendonly yes" in sick.stdout
        (here.folder / "c.txt").write_text("text\n")
        refused = here.embedctl("submit", "c.txt", EMBEDCTL_REDIS_URL=server.url)
        assert refused.returncode == 69
        assert "evicts keys" in refused.stderr
    finally:
        server.stop()
