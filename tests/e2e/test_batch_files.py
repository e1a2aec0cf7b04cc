"""OpenAI's batch files through the command line: in the place of `vllm run-batch`, and through a cluster."""

from __future__ import annotations

import base64
import json
import threading
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import redis as redis_py
from redis.backoff import NoBackoff
from redis.retry import Retry

from embedctl import Job
from embedctl.broker import Broker
from embedctl.results import Vectors
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.forked import Forked, run_forked
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl, children, is_running
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.workers import StartWorker

REQUESTS: list[dict[str, Any]] = [
    {
        "custom_id": f"request-{i}",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {
            "model": "dummy",
            "input": f"text {i}" if i % 3 else [f"text {i} {each}" for each in range(1 + i % 7)],
        },
    }
    for i in range(40)
]
REQUESTS[4]["body"]["encoding_format"] = "base64"
EMPTY = {"custom_id": "empty", "body": {"model": "dummy", "input": ["fine", ""]}}
LONG = {"custom_id": "long", "body": {"model": "dummy", "input": "word " * 300}}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "requests.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return name


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def vectors_of(line: dict[str, Any]) -> Vectors:
    found = [each["embedding"] for each in line["response"]["body"]["data"]]
    return np.array([np.frombuffer(base64.b64decode(v), "<f4") if isinstance(v, str) else v for v in found], np.float32)


def assert_answered(lines: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Each request has its vectors and its tokens, in order, as the official types have it."""
    types = pytest.importorskip("openai.types", reason="needs the package openai")
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
    assert len({line["id"] for line in lines}) == len(lines)
    for line, row in zip(lines, rows, strict=True):
        given = row["body"]["input"]
        texts = [given] if isinstance(given, str) else given
        np.testing.assert_array_equal(vectors_of(line), reference(texts))
        body = line["response"]["body"]
        assert isinstance(body["data"][0]["embedding"], str) == (row["body"].get("encoding_format") == "base64")
        for each, vector in zip(body["data"], vectors_of(line).tolist(), strict=True):
            each["embedding"] = vector  # as the official client decodes it
        answer = types.CreateEmbeddingResponse.model_validate(body, strict=True)
        assert [each.index for each in answer.data] == list(range(len(texts)))
        assert (answer.model, answer.usage.prompt_tokens) == ("dummy", sum(len(text.split()) for text in texts))


def test_a_batch_file_is_told_by_its_first_line_and_answered(
    embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    corpus = write(short_folder, [*REQUESTS, EMPTY, LONG])
    submitted = embedctl("submit", corpus, "--chunk-size", "5", "-o", "results.jsonl")
    assert submitted.returncode == 3, submitted.stderr
    assert_answered(lines_of(short_folder / "results.jsonl"), REQUESTS)
    errors = lines_of(short_folder / "results.errors.jsonl")
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("empty", 400), ("long", 400)]
    assert [line["response"]["body"]["error"] for line in errors] == [
        {
            "message": "input[1]: the text is empty",
            "type": "invalid_request_error",
            "param": "input",
            "code": "empty_input",
        },
        {
            "message": "300 tokens, and the model takes 256",
            "type": "invalid_request_error",
            "param": "input",
            "code": "context_length_exceeded",
        },
    ]
    assert {line["error"] for line in errors} == {None}

    job = submitted.stdout.strip()
    refused = embedctl("fetch", job, "-o", "results.jsonl", "--no-clobber")
    assert (refused.returncode, "results.jsonl exists" in refused.stderr) == (1, True)
    assert embedctl("fetch", job, "-o", "one.jsonl", "--one-file").returncode == 3
    together = lines_of(short_folder / "one.jsonl")
    assert_answered(together[:-2], REQUESTS)
    assert together[-2:] == errors
    assert not (short_folder / "one.errors.jsonl").exists()
    printed = embedctl("fetch", job, "-o", "-")
    assert printed.stdout == (short_folder / "one.jsonl").read_text()
    # In other formats, each text is a row.
    assert embedctl("fetch", job, "-o", "plain.jsonl", "--format", "jsonl").returncode == 3
    first = lines_of(short_folder / "plain.jsonl")[0]
    assert {name: first[name] for name in ("id", "index", "inputs")} == {"id": "request-0", "index": 0, "inputs": 1}
    fetched = embedctl("fetch", job, "-o", "out.parquet")
    assert (fetched.returncode, "Not in" in fetched.stderr) == (3, False)
    assert pq.read_table(short_folder / "out.parquet")["id"].to_pylist()[-3:] == ["empty", "empty", "long"]


def test_what_is_retried_comes_out_among_the_others(
    embedctl: RunEmbedctl, start_worker: StartWorker, settings: Settings, short_folder: Path
) -> None:
    small = start_worker("small")  # too little memory for a text of more than 100 tokens
    rows = [{"custom_id": str(size), "body": {"model": "dummy", "input": ["a", "word " * size]}} for size in (3, 150)]
    done = embedctl("submit", write(short_folder, rows), "--class", "small", "-o", "r.jsonl")
    assert done.returncode == 3, done.stderr
    (error,) = lines_of(short_folder / "r.errors.jsonl")
    assert (error["response"]["status_code"], error["response"]["body"]["error"]["code"]) == (500, "out_of_memory")
    small.kill()
    config = short_folder / "embedctl.toml"
    config.write_text(config.read_text().replace("memory_tokens = 100", "memory_tokens = 1000"))
    start_worker("small")
    assert embedctl("retry", done.stdout.strip()).returncode == 0
    assert Job.get(done.stdout.strip(), settings).wait(timeout=60).failed == 0
    assert embedctl("fetch", done.stdout.strip(), "-o", "r.jsonl").returncode == 0
    assert_answered(lines_of(short_folder / "r.jsonl"), rows)
    assert not (short_folder / "r.errors.jsonl").exists()


def test_a_stopped_job_has_a_line_for_each_request(
    embedctl: RunEmbedctl, start_worker: StartWorker, settings: Settings, short_folder: Path
) -> None:
    types = pytest.importorskip("openai.types", reason="needs the package openai")
    start_worker("slow")
    rows = [
        {"custom_id": f"r{i}", "body": {"input": [f"{i} {at} " + "word " * 40 for at in range(3)]}} for i in range(70)
    ]
    corpus = write(short_folder, rows)
    submitted = embedctl("submit", corpus, "--class", "slow", "--chunk-size", "5")
    job = submitted.stdout.strip()
    # Any chunk of five texts holds all three of some request.
    eventually(lambda: Job.get(job, settings).status().done >= 5)
    assert embedctl("stop", job).returncode == 0
    assert embedctl("fetch", job, "-o", "r.jsonl", "-i", corpus).returncode == 1
    answered, failed = lines_of(short_folder / "r.jsonl"), lines_of(short_folder / "r.errors.jsonl")
    assert answered
    whole = (short_folder / "r.jsonl").read_text()
    names = {line["custom_id"] for line in answered}
    assert_answered(answered, [row for row in rows if row["custom_id"] in names])
    assert [line["custom_id"] for line in failed] == [row["custom_id"] for row in rows if row["custom_id"] not in names]
    for line in failed:
        assert line["response"] is None
        assert types.BatchError.model_validate(line["error"]).code == "batch_cancelled"
    printed = embedctl("fetch", job, "-o", "-", "-i", corpus)
    assert [json.loads(line)["custom_id"] for line in printed.stdout.splitlines()] == [row["custom_id"] for row in rows]
    other = write(short_folder, rows[1:], "other.jsonl")
    refused = embedctl("fetch", job, "-o", "x.jsonl", "-i", other)
    assert (refused.returncode, "not the requests that job" in refused.stderr) == (2, True), refused.stderr

    # Without the file, nobody knows the requests of which nothing was encoded.
    embedctl("fetch", job, "-o", "r.jsonl")
    assert (short_folder / "r.jsonl").read_text() == whole
    known = lines_of(short_folder / "r.errors.jsonl") if (short_folder / "r.errors.jsonl").exists() else []
    assert all(line in failed for line in known)


@pytest.mark.parametrize("how", ["cancelled", "gone", "over budget"])
def test_a_job_that_ends_while_it_is_fetched_has_a_line_for_each_request(
    how: str,
    embedctl: RunEmbedctl,
    start_worker: StartWorker,
    settings: Settings,
    raw: redis_py.Redis,
    short_folder: Path,
) -> None:
    start_worker("slow")
    texts = [f"{i} " + "word " * 40 if how != "over budget" or i < 8 else "" for i in range(60)]
    rows = [{"custom_id": f"r{i}", "body": {"input": text}} for i, text in enumerate(texts)]
    corpus = write(short_folder, rows)
    ended = threading.Event()

    def end() -> None:
        eventually(lambda: [job for job in Broker.shared(settings).jobs.newest() if job.done >= 5])
        (job,) = Broker.shared(settings).jobs.newest()
        if how == "cancelled":
            Job.get(job.id, settings).cancel()
        elif how == "gone":
            eventually(lambda: raw.delete(*raw.scan_iter(f"*{job.id}*")) and not list(raw.scan_iter(f"*{job.id}*")))
        ended.set()

    ending = threading.Thread(target=end)
    ending.start()
    options = ["--class", "slow", "--chunk-size", "5", "-o", "r.jsonl", "--one-file", "--max-errors", "0"]
    done = embedctl("submit", corpus, *options)
    ending.join(PATIENCE_S)
    assert ended.is_set()
    assert done.returncode == {"cancelled": 1, "gone": 4, "over budget": 1}[how], done.stderr
    lines = lines_of(short_folder / "r.jsonl")
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows], done.stderr
    codes = {line["error"]["code"] for line in lines if line["response"] is None}
    assert codes == {{"cancelled": "batch_cancelled", "gone": "batch_expired", "over budget": "batch_failed"}[how]}
    answered = [line for line in lines if line["response"] and line["response"]["status_code"] == 200]
    assert_answered(answered, rows[: len(answered)])


@pytest.mark.parametrize("how", ["stop", "cancel", "over budget"])
def test_a_job_that_ends_while_it_is_submitted_has_a_line_for_each_request(
    how: str, embedctl: RunEmbedctl, start_worker: StartWorker, settings: Settings, short_folder: Path
) -> None:
    start_worker("slow")
    texts = [f"{i} " + "word " * 40 if how != "over budget" or i < 8 else "" for i in range(200)]
    rows = [{"custom_id": f"r{i}", "body": {"input": text}} for i, text in enumerate(texts)]

    def end() -> None:
        eventually(lambda: [job for job in Broker.shared(settings).jobs.newest() if job.done >= 5])
        (job,) = Broker.shared(settings).jobs.newest()
        embedctl(how, job.id)

    ending = threading.Thread(target=end)
    if how != "over budget":
        ending.start()
    options = ["--class", "slow", "--chunk-size", "5", "-o", "r.jsonl", "--one-file", "--max-errors", "0"]
    done = embedctl("submit", write(short_folder, rows), *options, LIMIT_HIGH_WATER_BYTES="2000")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    lines = lines_of(short_folder / "r.jsonl")
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
    codes = {line["error"]["code"] for line in lines if line["response"] is None}
    assert codes == {"batch_failed" if how == "over budget" else "batch_cancelled"}
    if how != "over budget":
        ending.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (
            [REQUESTS[0], REQUESTS[0]],
            [],
            "line 3: duplicate_custom_id (custom_id): its custom_id is that of requests.jsonl",
        ),
        ([REQUESTS[0], {"custom_id": "b", "body": {"model": "n", "input": "x"}}], [], "model_mismatch (body.model)"),
        ([REQUESTS[0]], ["--model", "n"], "'dummy', and 'n' in --model (EMBEDCTL_MODEL)"),
        ([REQUESTS[0]], ["--format", "openai-batch", "--keep", "a"], "leave out --text-field, --id-field, --keep and"),
        ([{"text": "a"}], ["--format", "openai-batch"], "missing_required_parameter (custom_id)"),
        ([{"text": "a"}], ["-o", "out.jsonl", "--one-file"], "--one-file is for the .jsonl output of a batch file"),
        (
            [{"text": "a", "id": 1}, {"text": "b", "id": 1}],
            ["--duplicates", "error"],
            "requests.jsonl, line 3: its id is that of",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_queued(
    rows: list[dict[str, Any]],
    options: list[str],
    words: str,
    embedctl: RunEmbedctl,
    raw: redis_py.Redis,
    short_folder: Path,
) -> None:
    done = embedctl("submit", write(short_folder, rows), *options)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not list(raw.scan_iter("embed:job:*"))


def test_mistakes_are_printed_as_json_too(embedctl: RunEmbedctl, short_folder: Path) -> None:
    types = pytest.importorskip("openai.types", reason="needs the package openai")
    done = embedctl(
        "submit",
        write(short_folder, [{"custom_id": "a", "url": "/v1/chat/completions"}]),
        "--format",
        "openai-batch",
        "--json",
    )
    (error,) = json.loads(done.stdout)["errors"]["data"]
    assert types.BatchError.model_validate(error).code == "url_mismatch"


@pytest.mark.slow
def test_ids_of_standard_input_are_checked_as_they_are_read(
    embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    twice = '{"text": "a", "id": 1}\n{"text": "b", "id": 1}\n'
    assert embedctl("submit", "-", "--wait", stdin=twice).returncode == 0
    done = embedctl("submit", "-", "--duplicates", "error", stdin=twice)
    assert (done.returncode, "record 1: its id is that of record 0" in done.stderr) == (2, True), done.stderr
    requests = "".join(json.dumps(row) + "\n" for row in REQUESTS)
    done = embedctl("submit", "-i", "-", "-o", "r.jsonl", stdin=requests)
    assert done.returncode == 0, done.stderr
    assert_answered(lines_of(short_folder / "r.jsonl"), REQUESTS)
    cut = embedctl("submit", "-", "-o", "cut.jsonl", "--limit", "3", "--duplicates", "all", stdin=requests)
    assert cut.returncode == 0, cut.stderr
    assert_answered(lines_of(short_folder / "cut.jsonl"), REQUESTS[:3])


@pytest.mark.slow
def test_a_reader_that_was_killed_is_resumed(
    environment: dict[str, str], embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker("slow")
    rows = [
        *REQUESTS,
        {"custom_id": "b", "body": {"input": [f"{i} " + "word " * 30 for i in range(80)]}},
        *[{"custom_id": f"s{i}", "body": {"input": f"{i} " + "word " * 30}} for i in range(20)],
    ]
    submitted = embedctl("submit", write(short_folder, rows), "--class", "slow", "--chunk-size", "5")
    fetch = ["fetch", submitted.stdout.strip(), "-o", "r.jsonl"]
    log = short_folder / "reader.log"
    reader = Forked(fetch, environment, short_folder, log, log)
    eventually(lambda: (short_folder / ".r.jsonl.part").exists())
    reader.kill()
    reader.wait()
    assert not (short_folder / "r.jsonl").exists()
    done = embedctl(*fetch)
    assert done.returncode == 0, done.stderr
    assert_answered(lines_of(short_folder / "r.jsonl"), rows)
    assert not list(short_folder.glob(".r.*"))


def has_results(socket: Path) -> bool:
    """Whether a private Redis holds a result."""
    with (
        redis_py.Redis(unix_socket_path=str(socket), retry=Retry(NoBackoff(), 0)) as raw,
        suppress(redis_py.RedisError),
    ):
        return next(raw.scan_iter(keys.chunk_result("*", "*"), 1000), None) is not None
    return False


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_where_it_stopped(environment: dict[str, str], short_folder: Path) -> None:
    rows = [*REQUESTS, *({"custom_id": f"s{i}", "body": {"input": f"{i} " + "word " * 30}} for i in range(100))]
    write(short_folder, rows)
    command = ["run", "-i", "requests.jsonl", "-o", "results.jsonl", "--class", "slow"]
    own = {**environment, "EMBEDCTL_REDIS_URL": "", "EMBEDCTL_CHUNK_SIZE": "5"}
    config = short_folder / "embedctl.toml"
    config.write_text(config.read_text().replace('model = "dummy"\n', ""))  # so only the requests name it
    run = Forked(command, own, short_folder, DEVNULL, DEVNULL)
    eventually(lambda: any(map(has_results, short_folder.glob("state/*/redis.sock"))))
    started = children(run.pid)
    assert len(started) == 2
    run.kill()
    run.wait()
    eventually(lambda: not any(is_running(pid) for pid in started))
    done = run_forked(command, own, short_folder)
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stderr
    assert_answered(lines_of(short_folder / "results.jsonl"), rows)
