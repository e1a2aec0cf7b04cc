"""What a stranger does with the command line beyond submit and fetch, and what goes wrong there."""

from __future__ import annotations

import csv
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedctl import JobState, JobUnfinished, OutputError, enqueue_embeddings
from embedctl.output import fetch
from embedctl.store import JobSpec
from embedctl_config.settings import Settings
from tests.conftest import RedisServer
from tests.e2e.conftest import eventually
from tests.e2e.test_main_job import reference

TEXTS = [f'text {i}, with "quotes" and ünïcode' for i in range(50)]
SLOW = [f"text {i} " + "word " * 60 for i in range(60)]


def write_corpus(path: Path, texts: list[str] = TEXTS) -> str:
    rows = [{"id": f"id-{i}", "text": text} for i, text in enumerate(texts)]
    name = path.name
    if ".jsonl" in name:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    elif ".parquet" in name:
        plain = path.with_suffix(".plain")
        pq.write_table(pa.Table.from_pylist(rows), plain)
        data = plain.read_bytes()
    elif ".txt" in name:
        data = "".join(text + "\n" for text in texts).encode()
    else:
        plain = path.with_suffix(".plain")
        with plain.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "text"], dialect="excel-tab" if ".tsv" in name else "excel")
            writer.writeheader()
            writer.writerows(rows)
        data = plain.read_bytes()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        "c.jsonl",
        "c.csv",
        "c.tsv",
        "c.txt",
        "c.parquet",
        "c.jsonl.gz",
        "c.csv.gz",
        "c.tsv.zst",
        "c.jsonl.zst",
        "c.parquet.gz",
    ],
)
def test_every_format_in_gives_the_same_vectors(name: str, embedctl, start_worker, short_folder: Path) -> None:
    start_worker()
    done = embedctl("submit", write_corpus(short_folder / name), "-o", "out.npy", "--chunk-size", "13")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(TEXTS))
    if ".txt" not in name:
        ids = [json.loads(line) for line in (short_folder / "out.ids.jsonl").read_text().splitlines()]
        assert ids == [f"id-{i}" for i in range(50)]


def test_every_format_out_holds_the_same_vectors(settings: Settings, start_worker, short_folder: Path) -> None:
    start_worker()
    texts = [*TEXTS[:20], "", *TEXTS[20:], "word " * 300]
    job = enqueue_embeddings(texts, ids=[f"id-{i}" for i in range(52)], chunk_size=7, settings=settings)
    job.wait(timeout=30)
    vectors = job.vectors()

    fetch(job, short_folder / "out.jsonl")
    rows = [json.loads(line) for line in (short_folder / "out.jsonl").read_text().splitlines()]
    assert [row["position"] for row in rows] == list(range(52))
    assert rows[20] == {"position": 20, "id": "id-20", "error": {"code": "empty", "message": "the text is empty"}}
    assert rows[51]["truncated"] == {"used": 256, "lost": 44}
    good = [row for row in rows if "embedding" in row]
    np.testing.assert_array_equal(np.array([row["embedding"] for row in good], np.float32), np.delete(vectors, 20, 0))

    fetch(job, short_folder / "out.parquet")
    table = pq.read_table(short_folder / "out.parquet")
    assert table["id"].to_pylist() == [f"id-{i}" for i in range(52)]
    assert table["embedding"].null_count == 1
    assert table["error_code"].to_pylist()[20] == "empty"
    assert (table["tokens_used"].to_pylist()[51], table["tokens_lost"].to_pylist()[51]) == (256, 44)
    column = [row for row in table["embedding"].to_pylist() if row is not None]
    np.testing.assert_array_equal(np.array(column, np.float32), np.delete(vectors, 20, 0))

    assert len(fetch(job, short_folder / "out.npy")) == 4
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), vectors)
    assert not list(short_folder.glob(".out*"))


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl", "out.parquet"])
def test_a_reader_that_was_killed_is_taken_up_again(
    name: str, settings: Settings, environment, start_worker, short_folder: Path
) -> None:
    start_worker("slow")
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=5, settings=settings)
    command = [sys.executable, "-m", "embedctl", "fetch", job.id, "-o", name]
    reader = subprocess.Popen(command, env=environment, cwd=short_folder, stderr=subprocess.DEVNULL)
    if name != "out.parquet":
        eventually(lambda: (short_folder / f".{name}.progress").exists())
    reader.kill()
    reader.wait()
    assert not (short_folder / name).exists()
    done = subprocess.run(command, env=environment, cwd=short_folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = reference(SLOW)
    if name == "out.npy":
        found = np.load(short_folder / name)
    elif name == "out.jsonl":
        lines = (short_folder / name).read_text().splitlines()
        found = np.array([json.loads(line)["embedding"] for line in lines], np.float32)
    else:
        found = np.array(pq.read_table(short_folder / name)["embedding"].to_pylist(), np.float32)
    np.testing.assert_array_equal(found, expected)
    assert not list(short_folder.glob(".out*"))


def test_two_fetches_to_one_file_do_not_mix(settings: Settings, environment, start_worker, short_folder: Path) -> None:
    job = enqueue_embeddings(SLOW, hardware="slow", settings=settings)
    command = [sys.executable, "-m", "embedctl", "fetch", job.id, "-o", "out.npy"]
    first = subprocess.Popen(command, env=environment, cwd=short_folder, stderr=subprocess.DEVNULL)
    eventually(lambda: (short_folder / ".out.npy.lock").exists())
    with pytest.raises(OutputError, match="another fetch"):
        fetch(job, short_folder / "out.npy")
    start_worker("slow")
    assert first.wait(60) == 0
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(SLOW))


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_a_full_disk_leaves_nothing_under_the_final_name(
    name: str, settings: Settings, environment, start_worker, short_folder: Path
) -> None:
    start_worker()
    job = enqueue_embeddings(TEXTS, settings=settings)
    job.wait(timeout=30)
    (short_folder / name).write_text("what stood here before")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    command = [sys.executable, "-m", "embedctl", "fetch", job.id, "-o", name]
    full = subprocess.run(
        command, env=environment, cwd=short_folder, capture_output=True, text=True, timeout=60, preexec_fn=small_disk
    )
    assert full.returncode == 1
    assert "can't be written: File too large" in full.stderr
    assert "Traceback" not in full.stderr
    assert (short_folder / name).read_text() == "what stood here before"
    assert not list(short_folder.glob(".out*.part"))


def test_failed_records_are_retried_in_their_places(settings: Settings, environment, start_worker, embedctl) -> None:
    config = Path(environment["EMBEDCTL_CONFIG"])
    good = config.read_text()
    config.write_text(good.replace("{dim = 16}", '{dim = 16, fail_on = "boom"}'))
    failing = start_worker()
    texts = [f"text {i}" + (" boom" if i in (3, 4, 17) else "") for i in range(30)]
    texts[9] = ""
    job = enqueue_embeddings(texts, chunk_size=10, settings=settings)
    assert job.wait(timeout=30).failed == 4
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
    status = job.wait(timeout=30)
    assert status.state is JobState.COMPLETED_WITH_ERRORS
    assert (status.records, status.done, status.failed) == (30, 29, 1)
    assert [(e.position, e.code) for e in job.errors()] == [(9, "empty")]
    others = [i for i in range(30) if i != 9]
    np.testing.assert_array_equal(job.vectors()[others], reference([texts[i] for i in others]))
    assert [p for chunk in job.iter_results() for p in chunk.positions] == list(range(30))

    assert job.retry_failed() == 1  # it fails again, and may be tried as often as one likes
    assert job.wait(timeout=30).failed == 1
    listed = embedctl("errors", job.id, "--json")
    assert [json.loads(line)["position"] for line in listed.stdout.splitlines()] == [9]


def test_an_error_budget_ends_a_hopeless_job(embedctl, start_worker, raw, short_folder: Path) -> None:
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


def test_bad_lines_are_named_before_anything_is_queued_or_left_out(embedctl, start_worker, raw, short_folder) -> None:
    lines = ['{"text": "one"}', "nonsense", '{"body": "two"}', "[1]", '{"text": "three"}']
    (short_folder / "c.jsonl").write_text("\n".join(lines))
    stopped = embedctl("submit", "c.jsonl")
    assert stopped.returncode == 2
    assert "c.jsonl, line 2: not JSON" in stopped.stderr
    assert not list(raw.scan_iter("embed:*"))

    start_worker()
    skipped = embedctl("submit", "c.jsonl", "--skip-bad-lines", "-o", "out.npy")
    assert skipped.returncode == 0, skipped.stderr
    for words in ("line 2: not JSON", "line 3: no field 'text'; fields seen: body", "line 4: expected an object"):
        assert words in skipped.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(["one", "three"]))

    piped = embedctl("submit", "-", stdin="\n".join(lines))
    assert piped.returncode == 2
    assert "standard input, line 2" in piped.stderr
    assert raw.zcard("embed:active") == 0 or all(
        raw.hget(b"embed:job:" + job, "state") == b"cancelled" for job in raw.zrange("embed:active", 0, -1)
    )


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (b"", [], "holds no record"),
        (b'{"text": "a"}', ["--text-field", "body"], "fields seen: text"),
        (b'{"text": "a", "id": 1.5}', [], "an id must be text or a whole number"),
        (b'{"text": "a"}', ["--class", "gpux"], "no hardware class 'gpux'"),
        (b'{"text": "a"}', ["--model", "no good"], "model name 'no good'"),
        (b'{"text": "a"}', ["-o", "out.xyz"], "name it .npy, .jsonl, .parquet"),
    ],
)
def test_bad_input_is_one_clear_line(content, arguments, words, embedctl, short_folder: Path) -> None:
    (short_folder / "c.jsonl").write_bytes(content)
    done = embedctl("submit", "c.jsonl", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_odd_texts_cost_only_themselves(embedctl, start_worker, short_folder: Path) -> None:
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
    settings: Settings, environment, raw, short_folder: Path
) -> None:
    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "embedctl", *arguments],
            env=environment,
            cwd=short_folder,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    submitting = start("submit", "-", "--format", "txt", "--chunk-size", "1")
    assert submitting.stdin
    submitting.stdin.write("one\ntwo\n")
    submitting.stdin.flush()
    eventually(lambda: raw.zcard("embed:active") == 1)
    time.sleep(0.2)
    submitting.send_signal(signal.SIGINT)
    _, told = submitting.communicate(timeout=20)
    assert submitting.returncode == 130
    assert "cancelled" in told
    [job_id] = raw.zrange("embed:active", 0, -1)
    assert raw.hget(b"embed:job:" + job_id, "state") == b"cancelled"

    job = enqueue_embeddings(["text"], settings=settings)
    for verb in (["wait", job.id], ["fetch", job.id, "-o", "out.npy"]):
        waiting = start(*verb)
        time.sleep(1.5)
        waiting.send_signal(signal.SIGINT)
        _, told = waiting.communicate(timeout=20)
        assert waiting.returncode == 130
        assert f"job {job.id} goes on" in told
    assert job.status().state is JobState.QUEUED


def test_list_wait_and_unknown_jobs(settings: Settings, embedctl, start_worker) -> None:
    jobs = [enqueue_embeddings([f"text {i}"], settings=settings) for i in range(3)]
    shown = embedctl("list", "--limit", "2").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["JOB", jobs[2].id, jobs[1].id]
    assert len(embedctl("list", "--json").stdout.splitlines()) == 3
    late = embedctl("wait", jobs[0].id, "--timeout", "0.2")
    assert late.returncode == 124
    assert "embedctl worker --class dummy --model dummy" in late.stderr
    start_worker()
    assert embedctl("wait", jobs[0].id).returncode == 0
    for verb in (["wait"], ["errors"], ["retry"], ["cancel"], ["fetch", "-o", "x.npy"]):
        unknown = embedctl(*verb, "20200101-000000-0000000000")
        assert unknown.returncode == 4
        assert "lost by the broker" in unknown.stderr


def test_dry_run_counts_without_queueing(embedctl, raw, start_worker, short_folder: Path) -> None:
    texts = ["A cat sits on the mat.", "A cat sits on the mat.", "", "word " * 600]
    (short_folder / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    done = embedctl("submit", "c.jsonl", "--dry-run", "--class", "cpu", "--model", "all-MiniLM-L6-v2")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert facts["records"] == "4"
    assert facts["unusable"] == "1"
    assert facts["duplicates"] == "1"
    assert facts["tokens"] == str(9 + 9 + 256)
    assert facts["truncated"] == "1"
    assert "6,144 bytes" in done.stdout
    assert not list(raw.scan_iter("embed:*"))
    guessed = embedctl("submit", "c.jsonl", "--dry-run").stdout
    assert "about" in guessed
    assert "tokenizer is not installed" in guessed


def test_config_show_tells_where_each_value_comes_from(embedctl, environment, short_folder: Path) -> None:
    secret = environment["EMBEDCTL_REDIS_URL"] + "?password=geheim"
    shown = embedctl("config", "show", EMBEDCTL_CHUNK_SIZE="77", EMBEDCTL_REDIS_URL=secret).stdout
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert "77  (EMBEDCTL_CHUNK_SIZE)" in lines["chunk_size"]
    assert environment["EMBEDCTL_CONFIG"] in lines["lease_s"]
    assert "(default)" in lines["window"]
    assert "geheim" not in shown
    wrong = embedctl("config", "show", EMBEDCTL_CHNK_SIZE="77", EMBEDCTL_TTL_S="soon")
    assert wrong.returncode == 2
    assert "Did you mean 'chunk_size'?" in wrong.stderr
    assert "EMBEDCTL_TTL_S" in wrong.stderr


def test_doctor_finds_what_is_wrong_and_says_what_to_do(embedctl, environment, short_folder: Path) -> None:
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


def test_a_wrong_password_is_said_and_not_shown(embedctl, short_folder: Path) -> None:
    folder = short_folder / "own"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    try:
        import redis

        redis.Redis.from_url(server.url).config_set("requirepass", "right")
        done = embedctl("list", EMBEDCTL_REDIS_URL=f"{server.url}?password=wrong")
        assert done.returncode == 69
        assert "refuses the user or the password" in done.stderr
        assert "wrong" not in done.stderr.replace("WRONGPASS", "")
        none = embedctl("list", EMBEDCTL_REDIS_URL=server.url)
        assert none.returncode == 69
        assert "Traceback" not in none.stderr
    finally:
        server.stop()


def test_up_keeps_a_stack_running_for_other_commands(environment, embedctl, short_folder: Path) -> None:
    (short_folder / "c.txt").write_text("one\ntwo\n")
    command = [sys.executable, "-m", "embedctl", "up", "--class", "dummy", "--model", "dummy"]
    own = {**environment, "EMBEDCTL_REDIS_URL": ""}
    up = subprocess.Popen(command, env=own, cwd=short_folder, stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout
        line = up.stdout.readline()
        assert line.startswith("export EMBEDCTL_REDIS_URL=unix://")
        url = line.strip().partition("=")[2]
        done = embedctl("submit", "c.txt", "-o", "out.npy", EMBEDCTL_REDIS_URL=url)
        assert done.returncode == 0, done.stderr
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    assert not Path(url.removeprefix("unix://")).exists()


def test_a_run_that_was_killed_leaves_nothing_running_and_goes_on(environment, short_folder: Path) -> None:
    (short_folder / "c.txt").write_text("\n".join(SLOW))
    command = [sys.executable, "-m", "embedctl", "run", "c.txt", "-o", "out.npy", "--class", "slow", "--model", "dummy"]
    own = {**environment, "EMBEDCTL_REDIS_URL": "", "EMBEDCTL_CHUNK_SIZE": "5"}
    run = subprocess.Popen(command, env=own, cwd=short_folder, stderr=subprocess.DEVNULL)
    eventually(lambda: (short_folder / ".out.npy.progress").exists(), timeout_s=60)
    children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    assert len(children) == 2
    run.kill()
    run.wait()
    eventually(lambda: not any(_running(pid) for pid in children), timeout_s=30)
    done = subprocess.run(command, env=own, cwd=short_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference([text.strip() for text in SLOW]))


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()


def test_a_fetch_begins_again_where_its_parts_are_gone_or_records_were_retried(
    settings: Settings, environment, start_worker, short_folder: Path
) -> None:
    start_worker()
    texts = [*TEXTS[:10], "", *TEXTS[10:]]
    job = enqueue_embeddings(texts, chunk_size=5, settings=settings)
    job.wait(timeout=30)
    expected = reference([text or "x" for text in texts])
    for name in ("out.npy", "out.jsonl"):
        progress = short_folder / f".{name}.progress"
        for retried in (0, 7):  # what is noted of another state of the job counts for nothing
            facts = {"chunks": 3, "size": 10_000, "ids": 9, "errors": 10_000, "truncated": 0}
            of = {"job": job.id, "format": name[4:], "retried": retried}
            progress.write_text(json.dumps({"of": of, "facts": facts}))
            fetch(job, short_folder / name)
            assert not list(short_folder.glob(".out*"))
    found = np.load(short_folder / "out.npy")
    np.testing.assert_array_equal(np.delete(found, 10, 0), np.delete(expected, 10, 0))
    rows = [json.loads(line) for line in (short_folder / "out.jsonl").read_text().splitlines()]
    assert [row["position"] for row in rows] == list(range(51))


def test_waiting_for_a_job_whose_producer_died_says_so(embedctl, broker, raw) -> None:
    job_id, _ = broker.jobs.create(JobSpec("dummy", "dummy", "fp32", {}, 60.0))
    late = embedctl("wait", job_id, "--timeout", "0.5")
    assert late.returncode == 124
    assert f"The producer of job {job_id} died" in late.stderr
    assert "submitting (stalled)" in embedctl("list").stdout


def test_a_run_whose_worker_dies_says_so_and_goes_on_when_run_again(environment, short_folder: Path) -> None:
    (short_folder / "c.txt").write_text("\n".join(SLOW))
    command = [sys.executable, "-m", "embedctl", "run", "c.txt", "-o", "out.npy", "--class", "slow", "--model", "dummy"]
    own = {**environment, "EMBEDCTL_REDIS_URL": "", "EMBEDCTL_CHUNK_SIZE": "5"}
    run = subprocess.Popen(command, env=own, cwd=short_folder, stderr=subprocess.PIPE, text=True)
    eventually(lambda: (short_folder / ".out.npy.progress").exists(), timeout_s=60)
    children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    [worker] = [pid for pid in children if b"embedctl_workers" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(worker, signal.SIGKILL)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "the worker ended with status -9" in told
    done = subprocess.run(command, env=own, cwd=short_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(SLOW))


def test_two_jobs_fetched_to_one_file_in_turn_never_mix(
    settings: Settings, environment, start_worker, short_folder: Path
) -> None:
    start_worker()
    jobs = [enqueue_embeddings([f"{name} {i}" for i in range(20)], chunk_size=5, settings=settings) for name in "ab"]
    for job in jobs:
        job.wait(timeout=30)
    note = {"of": {"job": jobs[0].id, "format": "jsonl", "retried": 0}, "facts": {"chunks": 1, "size": 10}}
    (short_folder / ".out.jsonl.progress").write_text(json.dumps(note))

    class Stop(Exception):
        pass

    def stop(_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        fetch(jobs[1], short_folder / "out.jsonl", progress=stop)
    assert not (short_folder / ".out.jsonl.progress").exists()
    fetch(jobs[0], short_folder / "out.jsonl")
    rows = [json.loads(line)["embedding"] for line in (short_folder / "out.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(np.array(rows, np.float32), reference([f"a {i}" for i in range(20)]))
