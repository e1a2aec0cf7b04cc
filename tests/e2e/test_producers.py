"""Producers that are killed, interrupted, slow or duplicated, and corpora that have changed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embedctl import Job, JobState
from embedctl.queueing.broker import Broker
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.jobs import active_job_id, assert_encoded
from tests.support.prepared import Put
from tests.support.store import active_jobs
from tests.support.waiting import eventually

TEXTS = [f"text {i}" for i in range(100)]
LINES = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)]


class Producer:
    """`embedctl submit` of a pipe, which gives it the corpus's first lines and then lets it wait for more."""

    def __init__(self, environment: dict[str, str], folder: Path, lease_s: int, *options: str) -> None:
        corpus = folder / "corpus.jsonl"
        corpus.unlink(missing_ok=True)
        os.mkfifo(corpus)
        command = ["submit", corpus.name, "--chunk-size", "10", *options]
        # As if producers that died were noticed sooner, or only after a test.
        leased = Put({("embedctl_config.keys", "PRODUCER_LEASE_S"): lease_s})
        self.process = Forked(command, environment, folder, prepare=leased)
        self.pipe = os.fdopen(os.open(corpus, os.O_RDWR), "w")  # which waits for no reader

    def give(self, lines: list[str]) -> None:
        self.pipe.writelines(lines)
        self.pipe.flush()

    def end(self) -> tuple[str, str]:
        """What it said on standard output and standard error."""
        out, err = self.process.communicate(timeout=60)
        self.pipe.close()
        return out, err


StartProducer = Callable[..., Producer]


@pytest.fixture
def start_producer(environment: dict[str, str], short_folder: Path) -> Iterator[StartProducer]:
    started: list[Producer] = []

    def start(*options: str, lease_s: int = 1) -> Producer:
        started.append(Producer(environment, short_folder, lease_s, *options))
        return started[-1]

    yield start
    for producer in started:
        if producer.process.poll() is None:
            producer.process.kill()
            producer.end()


def begun(broker: Broker, records: int) -> str:
    """The only job, once this many of its records are stored."""
    eventually(lambda: list(active_jobs(broker)))
    job_id = active_job_id(broker)
    eventually(lambda: broker.jobs.status(job_id).records == records)
    return job_id


def die_half_way(start_producer: StartProducer, broker: Broker, *options: str) -> str:
    """Kill a producer after 35 records, when 30 of them are stored. Return the job."""
    producer = start_producer(*options)
    producer.give(LINES[:35])
    job_id = begun(broker, 30)
    producer.process.kill()
    producer.end()
    eventually(lambda: broker.jobs.status(job_id).stalled)
    return job_id


def write_corpus(folder: Path, lines: list[str]) -> None:
    (folder / "corpus.jsonl").unlink(missing_ok=True)
    (folder / "corpus.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("way", ["key", "resume"])
def test_a_killed_producer_is_resumed_at_the_right_record(here: Here, way: str, start_producer: StartProducer) -> None:
    key = ["--resume", "k"] if way == "key" else []
    job_id = die_half_way(start_producer, here.broker, *key)
    here.start_worker()
    eventually(lambda: here.broker.jobs.status(job_id).done == 30)
    write_corpus(here.folder, LINES)
    again = here.embedctl("submit", "corpus.jsonl", "--chunk-size", "10", *(key or ["--resume", job_id]))
    assert (again.returncode, again.stdout) == (0, f"{job_id}\n"), again.stderr
    assert here.broker.jobs.newest_ids(2) == [job_id]
    assert_encoded(Job.get(job_id, here.settings), TEXTS)
    assert here.broker.jobs.status(job_id).claims == 10
    ids = [label for chunk in Job.get(job_id, here.settings).iter_results() for label in chunk.ids]
    assert ids == list(range(100))


def test_two_submitters_with_one_key_at_the_same_time_make_one_job(here: Here) -> None:
    here.start_worker()
    write_corpus(here.folder, LINES)
    command = ["submit", "corpus.jsonl", "--chunk-size", "5", "--resume", "k"]
    both = [Forked(command, here.environment, here.folder) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said == here.broker.jobs.newest_ids(2) * 2
    assert_encoded(Job.get(said[0], here.settings), TEXTS)
    assert Job.get(said[0], here.settings).status().claims == 20


def test_ctrl_c_leaves_a_job_for_another_that_goes_on_at_once(here: Here, start_producer: StartProducer) -> None:
    """A producer's right to add ends with the producer. Only after a kill do others have to wait for it."""
    first = start_producer("--resume", "k", lease_s=3600)
    first.give(LINES[:35])
    job_id = begun(here.broker, 30)
    first.process.send_signal(signal.SIGINT)
    _, said = first.end()
    assert first.process.returncode == 130
    assert "the same command resumes where it stopped" in said
    assert here.broker.jobs.status(job_id).state is JobState.SUBMITTING
    write_corpus(here.folder, LINES)
    resumed = here.embedctl("submit", "corpus.jsonl", "--resume", job_id)
    assert (resumed.returncode, resumed.stdout) == (0, f"{job_id}\n"), resumed.stderr
    here.start_worker()
    assert_encoded(Job.get(job_id, here.settings), TEXTS)
