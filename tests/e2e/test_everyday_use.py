"""A newcomer's use of the command line beyond submit and fetch, and the errors they may meet."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import redis as redis_py

from embedctl import JobState, JobUnfinished, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.store import JobSpec
from embedctl_config.settings import Settings
from tests.support.forked import Forked
from tests.support.jobs import active_job_id, reference
from tests.support.processes import RunEmbedctl
from tests.support.redis_server import RedisServer
from tests.support.store import active_jobs, pass_ms
from tests.support.waiting import eventually
from tests.support.workers import StartWorker


def test_failed_records_are_retried_in_their_places(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker, embedctl: RunEmbedctl
) -> None:
    config = Path(environment["EMBEDCTL_CONFIG"])
    good = config.read_text()
    config.write_text(good.replace("{dim = 16}", "{dim = 16, poison = true}"))
    failing = start_worker()
    texts = [f"text {i}" + (" fail-encoder" if i in (3, 4, 17) else "") for i in range(30)]
    texts[9] = ""
    job = enqueue_embeddings(texts, chunk_size=10, settings=settings)
    assert job.wait(timeout=60).failed == 4
    assert [(e.position, e.code) for e in job.errors()] == [
        (3, "encode_error"),
        (4, "encode_error"),
        (9, "empty"),
        (17, "encode_error"),
    ]
    failing.stop()
    config.write_text(good)
    assert "4 records queued again" in embedctl("retry", job.id).stderr
    with pytest.raises(JobUnfinished):
        job.vectors()
    start_worker()
    status = job.wait(timeout=60)
    assert status.state is JobState.COMPLETED_WITH_ERRORS
    assert (status.records, status.done, status.failed) == (30, 29, 1)
    assert [(e.position, e.code) for e in job.errors()] == [(9, "empty")]
    others = [i for i in range(30) if i != 9]
    np.testing.assert_array_equal(job.vectors()[others], reference([texts[i] for i in others]))
    assert [p for chunk in job.iter_results() for p in chunk.positions] == list(range(30))

    assert job.retry_failed() == 1  # the record fails again, and may be retried any number of times
    assert job.wait(timeout=60).failed == 1
    listed = embedctl("errors", job.id, "--json")
    assert [error["position"] for error in json.loads(listed.stdout)] == [9]


def test_an_error_budget_ends_a_hopeless_job(
    embedctl: RunEmbedctl, start_worker: StartWorker, raw: redis_py.Redis, short_folder: Path
) -> None:
    start_worker()
    (short_folder / "c.txt").write_text("\n" * 40 + "text\n" * 400)
    share = embedctl("submit", "c.txt", "--wait", "--chunk-size", "10", "--max-errors", "5%")
    assert share.returncode == 1
    job_id = share.stdout.strip()
    assert "ended by max_errors" in embedctl("status", job_id).stdout
    assert len(embedctl("errors", job_id).stdout.splitlines()) >= 20
    refused = embedctl("fetch", job_id, "-o", "out.npy")
    assert refused.returncode == 1
    assert "error budget" in refused.stderr
    eventually(lambda: not list(raw.scan_iter(f"embed:job:{job_id}:in:*")))

    assert embedctl("submit", "c.txt", "--wait", "--max-errors", "40").returncode == 3
    assert embedctl("submit", "c.txt", "--max-errors", "many").returncode == 2


def test_bad_lines_are_named_before_anything_is_queued_or_left_out(
    embedctl: RunEmbedctl, start_worker: StartWorker, broker: Broker, raw: redis_py.Redis, short_folder: Path
) -> None:
    lines = ['{"text": "one"}', "nonsense", '{"body": "two"}', "[1]", '{"text": "three"}']
    (short_folder / "c.jsonl").write_text("\n".join(lines))
    stopped = embedctl("submit", "c.jsonl")
    assert stopped.returncode == 2
    assert stopped.stderr.startswith(
        "embedctl: 3 lines are bad, and nothing is queued. To leave such lines out, give --"
    )
    assert "\n  c.jsonl, line 2: not JSON" in stopped.stderr
    assert not list(raw.scan_iter("embed:*"))

    start_worker()
    skipped = embedctl("submit", "c.jsonl", "--skip-bad-lines", "-o", "out.npy")
    assert skipped.returncode == 0, skipped.stderr
    for words in ("line 2: not JSON", "line 3: no field 'text'; fields seen: body", "line 4: expected an object"):
        assert f"skipped before record 1: c.jsonl, {words}" in skipped.stderr
    assert "skipped 3 bad lines; positions count the records that are left\n" in skipped.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(["one", "three"]))

    piped = embedctl("submit", "-", stdin="\n".join(lines))
    assert piped.returncode == 2
    assert "standard input, line 2" in piped.stderr
    assert all(broker.jobs.status(job_id).state is JobState.CANCELLED for job_id in active_jobs(broker))


def test_odd_texts_cost_only_themselves(embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path) -> None:
    start_worker()
    lines = [
        b'{"text": "good"}',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": "nul \\u0000 inside"}',
        b'{"text": "lone \\ud800"}',
        b'{"text": "bad \xff utf-8"}',
        b'{"text": "' + b"long " * 2_000_000 + b'"}',
    ]
    (short_folder / "c.jsonl").write_bytes(b"\n".join(lines))
    done = embedctl("submit", "c.jsonl", "-o", "out.npy")
    assert done.returncode == 3, done.stderr
    failed = [json.loads(line) for line in (short_folder / "out.errors.jsonl").read_text().splitlines()]
    assert [(each["position"], each["code"]) for each in failed] == [
        (1, "not_text"),
        (2, "not_text"),
        (4, "invalid_utf8"),
        (5, "invalid_utf8"),
        (6, "too_long"),
    ]
    np.testing.assert_array_equal(np.load(short_folder / "out.npy")[[0, 3]], reference(["good", "nul \0 inside"]))


def test_interrupting_a_submission_cancels_it_and_interrupting_a_wait_does_not(
    settings: Settings, environment: dict[str, str], broker: Broker, raw: redis_py.Redis, short_folder: Path
) -> None:
    def reading() -> set[str]:
        return {client["id"] for client in raw.client_list() if client["cmd"] == "xread"}

    def another_reads(known: set[str]) -> bool:
        return bool(reading() - known)

    # Shells show 130 for both: Python ends itself by the signal where that came while it ran code from a string, as
    # `dataclass` does, whatever became of the exception.
    interrupted = (130, -signal.SIGINT)
    submitting = subprocess.Popen(
        [sys.executable, "-m", "embedctl", "submit", "-", "--format", "txt", "--chunk-size", "1"],
        env=environment,
        cwd=short_folder,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert submitting.stdin
    submitting.stdin.write("one\ntwo\n")
    submitting.stdin.flush()
    eventually(lambda: list(active_jobs(broker)))
    job_id = active_job_id(broker)
    eventually(lambda: broker.jobs.status(job_id).chunks)  # it reads records
    submitting.send_signal(signal.SIGINT)
    _, told = submitting.communicate(timeout=60)
    assert submitting.returncode in interrupted, told
    assert "cancelled" in told
    assert broker.jobs.status(job_id).state is JobState.CANCELLED

    job = enqueue_embeddings(["text"], settings=settings)
    for verb in (["wait", job.id], ["fetch", job.id, "-o", "out.npy"]):
        known = reading()  # the connection of the command before may still stand in the list
        waiting = Forked(verb, environment, short_folder)
        eventually(partial(another_reads, known))
        waiting.send_signal(signal.SIGINT)
        _, told = waiting.communicate(timeout=60)
        assert waiting.returncode in interrupted, told
        assert f"job {job.id} goes on" in told
    assert job.status().state is JobState.QUEUED


def test_list_wait_and_unknown_jobs(settings: Settings, embedctl: RunEmbedctl, start_worker: StartWorker) -> None:
    jobs = []
    for i in range(3):
        jobs.append(enqueue_embeddings([f"text {i}"], settings=settings))
        pass_ms(Broker.shared(settings))  # those of one millisecond are in no order
    shown = embedctl("list", "--limit", "2").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["JOB", jobs[2].id, jobs[1].id]
    assert len(json.loads(embedctl("list", "--json").stdout)) == 3
    late = embedctl("wait", jobs[0].id, "--timeout", "0.2")
    assert late.returncode == 124
    assert "embedctl worker --class dummy --model dummy" in late.stderr
    start_worker()
    assert embedctl("wait", jobs[0].id).returncode == 0
    for verb in (["wait"], ["errors"], ["retry"], ["cancel"], ["fetch", "-o", "x.npy"]):
        unknown = embedctl(*verb, "20200101-000000-0000000000")
        assert unknown.returncode == 4
        assert "lost by the broker" in unknown.stderr


def test_dry_run_counts_without_queueing(embedctl: RunEmbedctl, raw: redis_py.Redis, short_folder: Path) -> None:
    texts = ["A cat sits on the mat.", "A cat sits on the mat.", "", "word " * 600]
    (short_folder / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    of_model = ["--class", "cpu", "--model", "all-MiniLM-L6-v2", "--long", "mean", "--dimensions", "64"]
    windows = embedctl("submit", "c.jsonl", "--dry-run", *of_model)
    assert windows.returncode == 0, windows.stderr
    facts = dict(line.split(None, 1) for line in windows.stdout.splitlines())
    assert (facts["records"], facts["unusable"], facts["duplicates"]) == ("4", "1", "1")
    assert facts["tokens"] == str(9 + 9 + 600 + 3 * 2)
    assert facts["truncated"] == "0"
    assert "1,024 bytes" in windows.stdout
    assert not list(raw.scan_iter("embed:*"))
    guessed = embedctl("submit", "c.jsonl", "--dry-run").stdout
    assert "about" in guessed
    assert "tokenizer is not installed" in guessed


def test_dimensions_and_means_come_out_of_the_command_line(
    embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    (short_folder / "c.txt").write_text("a b\n" + "word " * 700 + "\n")
    done = embedctl("submit", "c.txt", "--dimensions", "5", "--long", "mean", "--wait")
    assert done.returncode == 0, done.stderr
    for name in ("v.npy", "v.parquet", "v.jsonl"):
        assert embedctl("fetch", done.stdout.strip(), "-o", name).returncode == 0
    rows = [json.loads(line) for line in (short_folder / "v.jsonl").read_text().splitlines()]
    assert not any("truncated" in row for row in rows)
    vectors = np.load(short_folder / "v.npy")
    assert vectors.shape == (2, 5)
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, rtol=0, atol=1e-6)
    for others in (
        [row["embedding"] for row in rows],
        pq.read_table(short_folder / "v.parquet")["embedding"].to_pylist(),
    ):
        np.testing.assert_array_equal(np.array(others, np.float32), vectors)
    assert not (short_folder / "v.truncated.jsonl").exists()
    assert embedctl("submit", "c.txt", "--dimensions", "0").returncode == 2
    too_many = embedctl("submit", "c.txt", "--dimensions", "17")
    assert too_many.returncode == 2
    assert "more than the 16 that vectors of dummy have" in too_many.stderr


def test_config_show_tells_where_each_value_comes_from(embedctl: RunEmbedctl, environment: dict[str, str]) -> None:
    secret = environment["EMBEDCTL_REDIS_URL"] + "?password=geheim"
    shown = embedctl("config", "show", EMBEDCTL_CHUNK_SIZE="77", EMBEDCTL_REDIS_URL=secret).stdout
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert "77  (EMBEDCTL_CHUNK_SIZE)" in lines["chunk_size"]
    assert environment["EMBEDCTL_CONFIG"] in lines["lease_s"]
    assert "(default)" in lines["ttl_s"]
    assert "geheim" not in shown
    wrong = embedctl("config", "show", EMBEDCTL_CHNK_SIZE="77", EMBEDCTL_TTL_S="soon")
    assert wrong.returncode == 2
    assert "Did you mean 'chunk_size'?" in wrong.stderr
    assert "EMBEDCTL_TTL_S" in wrong.stderr


def test_doctor_finds_what_is_wrong_and_says_what_to_do(embedctl: RunEmbedctl, short_folder: Path) -> None:
    healthy = embedctl("doctor")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "maxmemory below 60%" in healthy.stdout
    assert "embedctl worker --class cpu" in healthy.stdout

    folder = short_folder / "own"
    folder.mkdir()
    server = RedisServer(
        folder, extra=["--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no"]
    )
    server.start()
    try:
        sick = embedctl("doctor", EMBEDCTL_REDIS_URL=server.url)
        assert sick.returncode == 1
        assert "maxmemory-policy noeviction" in sick.stdout
        assert "appendonly yes" in sick.stdout
        (short_folder / "c.txt").write_text("text\n")
        refused = embedctl("submit", "c.txt", EMBEDCTL_REDIS_URL=server.url)
        assert refused.returncode == 69
        assert "evicts keys" in refused.stderr
    finally:
        server.stop()
    down = embedctl("doctor", EMBEDCTL_REDIS_URL=server.url)
    assert down.returncode == 1
    assert "can't be reached" in down.stdout


def test_a_wrong_password_is_said_and_not_shown(embedctl: RunEmbedctl, own_redis: RedisServer) -> None:
    with redis_py.Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "right")
    done = embedctl("list", EMBEDCTL_REDIS_URL=f"{own_redis.url}?password=wrong")
    assert done.returncode == 69
    assert "refuses the user or the password" in done.stderr
    assert "wrong" not in done.stderr.replace("WRONGPASS", "")
    none = embedctl("list", EMBEDCTL_REDIS_URL=own_redis.url)
    assert none.returncode == 69
    assert "Traceback" not in none.stderr


def test_waiting_for_a_job_whose_producer_died_says_so(embedctl: RunEmbedctl, broker: Broker) -> None:
    job_id, _ = broker.jobs.create(JobSpec("dummy", "dummy", "fp32", {}, 60.0))
    late = embedctl("wait", job_id, "--timeout", "0.5")
    assert late.returncode == 124
    assert f"The producer of job {job_id} died" in late.stderr
    assert "submitting (stalled)" in embedctl("list").stdout
