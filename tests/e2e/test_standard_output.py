"""Results on standard output: jsonl alone, as it comes, for every command that writes results."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from embedctl import Job, enqueue_embeddings
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE_S, eventually

TEXTS = [f"text {i}" for i in range(40)]
SLOW = [f"text {i} " + "word " * 60 for i in range(18)]


def rows_of(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


def assert_whole(output: str, texts: list[str] = TEXTS) -> None:
    rows = rows_of(output)
    assert [row["position"] for row in rows] == list(range(len(texts)))
    np.testing.assert_array_equal(np.array([row["embedding"] for row in rows], np.float32), reference(texts))


def piped(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a Python of its own, whose end is tested too; its standard output is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "embedctl", *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def corpus(short_folder: Path) -> str:
    (short_folder / "c.txt").write_text("\n".join(TEXTS) + "\n")
    return "c.txt"


def test_submit_prints_results_and_says_the_id_on_the_other_stream(here: Here, corpus: str) -> None:
    here.start_worker()
    done = here.embedctl("submit", corpus, "-o", "/dev/stdout", "--chunk-size", "9", status=0)
    assert_whole(done.stdout)
    assert Job.get(done.stderr.split()[0], here.settings).status().done == 40
    assert "Wrote" not in done.stderr
    assert sorted(each.name for each in here.folder.glob("*.jsonl")) == []


def test_chunks_are_printed_while_others_are_encoded(here: Here) -> None:
    job = enqueue_embeddings(SLOW, hardware="slow", chunk_size=2, settings=here.settings)
    fetching = Forked(["fetch", job.id, "-o", "-"], here.environment, here.folder)
    eventually(
        lambda: any(each["cmd"] == "xread" and "b" in each["flags"] for each in here.raw.client_list()),
        what="a fetch that waits",
    )
    here.start_worker("slow")
    assert fetching.stdout
    assert json.loads(fetching.stdout.readline())["position"] == 0
    assert not job.status().state.ended
    assert len(fetching.stdout.readlines()) == len(SLOW) - 1
    assert fetching.wait(60) == 0


def test_a_closed_pipe_ends_the_command_quietly_and_not_the_job(here: Here) -> None:
    here.start_worker()
    texts = TEXTS * 50  # more than a pipe holds, so that the command is still writing
    job = enqueue_embeddings(texts, settings=here.settings)
    process = piped(here.environment, here.folder, "fetch", job.id, "-o", "-")
    assert process.stdout
    assert process.stderr
    assert process.stdout.readline().startswith('{"position":0')
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
    assert job.wait(timeout=60).done == len(texts)


def test_a_full_disk_is_an_error_in_one_line(here: Here) -> None:
    here.start_worker()
    job = enqueue_embeddings(TEXTS, settings=here.settings)
    with Path("/dev/full").open("wb") as full:
        process = Forked(["fetch", job.id, "-o", "-"], here.environment, None, full.fileno())
    _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (1, "embedctl: standard output can't be written: No space left on device\n")


def test_a_closed_standard_output_is_an_error_in_one_line(here: Here, corpus: str) -> None:
    command = f'exec "{sys.executable}" -m embedctl submit {corpus} -o - >&-'
    done = subprocess.run(
        ["sh", "-c", command], env=here.environment, cwd=here.folder, stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (1, "embedctl: standard output is closed: name a file, or open it\n")
    assert here.broker.jobs.newest_ids(2) == []


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_everything(here: Here) -> None:
    here.start_worker()
    job = enqueue_embeddings(["word"] * 3000, settings=here.settings)
    job.wait(timeout=60)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = Forked(["fetch", job.id, "-o", "-"], here.environment, None, writer, subprocess.DEVNULL)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert len(stream.readlines()) == 3000
    assert process.wait(60) == 0


@pytest.mark.slow
def test_run_prints_everything_again_and_encodes_only_what_is_left(here: Here, redis_server: RedisServer) -> None:
    here.environment["EMBEDCTL_REDIS_URL"] = redis_server.url  # its user is a producer's and a worker's at once
    texts = [f"text {i} " + "word " * 60 for i in range(80)]  # more than a worker has in hand as it is stopped
    (here.folder / "slow.txt").write_text("\n".join(texts) + "\n")
    arguments = ["run", "slow.txt", "--class", "slow", "--chunk-size", "2", "-o", "-", "-q"]
    first = piped(here.environment, here.folder, *arguments)
    assert first.stdout
    assert first.stderr
    for _ in range(5):
        first.stdout.readline()
    first.stdout.close()
    assert first.wait(60) == 0
    assert first.stderr.read() == ""
    (job_id,) = here.broker.jobs.newest_ids(2)
    assert 4 <= here.broker.jobs.status(job_id).done < len(texts)

    second = piped(here.environment, here.folder, *arguments[:-1])
    output, said = second.communicate(timeout=60)
    assert second.returncode == 0
    assert_whole(output, texts)
    assert "this command resumed it at" in said
    assert not here.broker.jobs.newest_ids(2)


def test_progress_is_not_drawn_over_results_on_the_same_terminal(here: Here) -> None:
    here.start_worker("slow")
    job = enqueue_embeddings(SLOW[:8], hardware="slow", chunk_size=2, settings=here.settings)
    for both in (True, False):
        ours, theirs = pty.openpty()
        out = theirs if both else subprocess.DEVNULL
        process = Forked(["fetch", job.id, "-o", "-"], here.environment, None, out, theirs)
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # a terminal whose other end is closed
            while data := os.read(ours, 65536):
                shown += data
        os.close(ours)
        assert process.wait(60) == 0
        assert (b"\x1b[" in shown) is not both
        if both:
            records = [line for line in shown.decode().splitlines(keepends=True) if line.startswith("{")]
            assert_whole("".join(records), SLOW[:8])
