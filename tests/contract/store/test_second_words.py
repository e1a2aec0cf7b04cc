"""What a worker can't do with a chunk counts when another one can't either, where there is another one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from redis import Redis

from embedctl import Job, enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.store import Doubts
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend, _token
from embedctl_workers.serving.runner import _LATER_S
from tests.support.rig import Rig
from tests.support.store import QUEUE, end_pause, lapse, new_job, reaped, row, some, take

TEXTS = [f"text {at} of {at}" for at in range(64)]


class Failing(DummyBackend):
    """A backend whose next calls fail with an error, which fails with long rows, and is of no use after a word.

    Attributes:
        falls_after: how many calls it stands before it is of no use either.
    """

    def __init__(self) -> None:
        super().__init__(dim=16, poison=True)
        self.error: Exception | None = None
        self.calls = 0
        self.too_long = 1000
        self.falls_at = ""
        self.falls_after = 10**9
        self.fallen = False

    def fail(self, calls: int, error: Exception) -> None:
        self.calls, self.error = calls, error

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        if self.calls and self.error is not None:
            self.calls -= 1
            raise self.error
        deadly = _token(self.falls_at)
        self.falls_after -= 1
        self.fallen = (
            self.fallen or self.falls_after < 0 or any(deadly in tokens.columns["input_ids"][row] for row in rows)
        )
        if self.fallen:
            raise RuntimeError("could not create a primitive")
        if int(tokens.lengths[rows].max()) > self.too_long:
            raise MemoryError("a row is too long for this worker")
        return super().forward(tokens, rows)


@dataclass
class Worker(Rig):
    """A worker of this process, alive as far as others see."""

    backend: Failing

    def __post_init__(self) -> None:
        super().__post_init__()
        self.broker.workers.beat(row(self.name))


#: Starts a worker of this name.
Enlist = Callable[[str], Worker]


@pytest.fixture
def worker(broker: Broker, settings: Settings) -> Enlist:
    return lambda name: Worker(broker, settings, Failing(), name=name)


def submit(settings: Settings, texts: Sequence[str], **options: Any) -> Job:
    return enqueue_embeddings(list(texts), settings=settings, **options)


def with_bad(*at: int, word: str = "fail-encoder") -> list[str]:
    return [f"{word} {row}" if row in at else text for row, text in enumerate(TEXTS)]


def failed(job: Job) -> list[tuple[int, str]]:
    return [(error.position, error.code) for error in job.errors()]


def doubts(raw: Redis, job: Job, chunk: int = 0) -> Doubts | None:
    found = raw.hget(keys.attempts(job.id), f"{chunk}:doubts")
    return Doubts.parse(found) if isinstance(found, bytes) else None


@pytest.mark.parametrize(
    ("word", "bad", "code"), [("fail-encoder", range(7), "encode_error"), ("out-of-memory", [13], "out_of_memory")]
)
def test_many_bad_records_or_ones_for_want_of_memory_fail_when_a_second_worker_says_so(
    settings: Settings, raw: Redis, worker: Enlist, word: str, bad: Sequence[int], code: str
) -> None:
    first, second = worker("first"), worker("second")
    job = submit(settings, with_bad(*bad, word=word))
    first.run()
    status = job.status()
    assert (status.done, status.failed, status.deaths, status.trouble) == (0, 0, 0, None)
    assert doubts(raw, job) == Doubts({"first": frozenset(bad)}, rounds=1)
    second.run()
    assert failed(job) == [(row, code) for row in bad]
    assert job.status().done == 64 - len(bad)
    assert first.left + second.left == []


@pytest.mark.parametrize(
    ("word", "code", "bad"),
    [("fail-encoder", "encode_error", [1, 5, 9, 20, 44, 63]), ("not-a-number", "non_finite", [13])],
)
def test_one_word_fails_a_few(settings: Settings, worker: Enlist, word: str, code: str, bad: Sequence[int]) -> None:
    first, _ = worker("first"), worker("second")
    job = submit(settings, with_bad(*bad, word=word))
    first.run()
    assert failed(job) == [(row, code) for row in bad]
    assert (job.status().done, job.status().claims) == (64 - len(bad), 1)


@pytest.mark.parametrize(
    ("texts", "claims"), [(["a", "fail-encoder"], 1), (["fail-encoder"], 2), (["", "fail-encoder"], 2)]
)
def test_half_of_a_chunk_is_not_few(settings: Settings, worker: Enlist, texts: Sequence[str], claims: int) -> None:
    first, second = worker("first"), worker("second")
    job = submit(settings, texts)
    first.run()
    second.run()
    assert (job.status().state.ended, job.status().claims) == (True, claims)


def test_what_is_deterministic_needs_no_second_word(settings: Settings, worker: Enlist) -> None:
    first, _ = worker("first"), worker("second")
    job = submit(settings, ["", "one", "fail-tokenizer", "w " * 300], long="error")
    first.run()
    assert failed(job) == [(0, "empty"), (2, "encode_error"), (3, "too_long")]
    assert job.status().claims == 1


def test_rows_that_only_the_second_fails_are_tried_again(settings: Settings, raw: Redis, worker: Enlist) -> None:
    first, second = worker("first"), worker("second")
    second.backend.too_long = 30
    job = submit(settings, [*with_bad(13, word="out-of-memory"), "word " * 40])
    first.run()
    second.run()
    assert doubts(raw, job) == Doubts({"first": frozenset({13}), "second": frozenset({13, 64})}, rounds=2)
    assert job.status().failed == 0
    first.run()
    assert failed(job) == [(13, "out_of_memory")]


def test_a_worker_leaves_what_it_has_doubted_to_another_until_its_own_second_word_counts(
    settings: Settings, broker: Broker, raw: Redis, worker: Enlist, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = worker("first"), worker("second")
    rests: list[float] = []
    monkeypatch.setattr(first.runner.draining, "wait", rests.append)
    job = submit(settings, with_bad(13, word="out-of-memory"))
    first.run()
    raw.delete(QUEUE)
    first.run()
    assert (job.status().claims, job.status().done, raw.llen(QUEUE)) == (1, 0, 1)  # a bell for the other one
    assert rests == [_LATER_S]
    who, until = (raw.hget(keys.attempts(job.id), "0:not") or b"").split()
    assert (who, int(until) > broker.connection.now_ms()) == (b"first", True)
    raw.hset(keys.attempts(job.id), "0:not", "first 1")
    first.run()
    assert (job.status().claims, failed(job)) == (2, [(13, "out_of_memory")])


def test_a_worker_that_is_alone_leaves_nothing_to_others(settings: Settings, broker: Broker, worker: Enlist) -> None:
    first, second = worker("first"), worker("second")
    job = submit(settings, with_bad(13, word="out-of-memory"))
    first.run()
    broker.workers.leave(row(second.name))
    first.run()
    assert failed(job) == [(13, "out_of_memory")]


def test_a_transient_failure_costs_no_record(settings: Settings, worker: Enlist) -> None:
    """As when a process beside it has taken all file descriptors for a while."""
    alone = worker("alone")
    job = submit(settings, TEXTS)
    alone.backend.fail(40, OSError(24, "Too many open files"))
    alone.run()
    status = job.status()
    assert (status.done, status.failed, status.deaths) == (0, 0, 0)
    assert alone.left == [71]
    assert (status.trouble or "").endswith(
        "text of its own: the backend failed: OSError: [Errno 24] Too many open files"
    )
    after = worker("after")
    after.backend.fail(7, OSError(24, "Too many open files"))  # the batch, and its halves down to one row: over at once
    after.run()
    assert (job.status().done, job.status().failed, after.left) == (64, 0, [])


def test_a_worker_whose_vectors_have_changed_is_sick_where_a_record_fails(settings: Settings, worker: Enlist) -> None:
    alone = worker("alone")
    job = submit(settings, with_bad(13))
    alone.backend._seed = 1
    alone.run()
    assert alone.left == [71]
    assert "a text of this worker's own has another vector than at its start" in (job.status().trouble or "")
    assert (job.status().done, job.status().failed) == (0, 0)


def test_a_suspect_chunk_needs_two_words(settings: Settings, broker: Broker, raw: Redis, worker: Enlist) -> None:
    first, second = worker("first"), worker("second")
    job = submit(settings, with_bad(13, word="out-of-memory"))
    broker.workers.beat(row("doomed"))
    assert take(broker, instance="doomed", fingerprint=first.backend.fingerprint)
    broker.workers.report_death("doomed", "killed")
    lapse(raw, job.id, 0)
    reaped(broker, job.id)
    end_pause(broker, raw, job.id, 0)
    first.run()
    assert (job.status().done, job.status().failed) == (0, 0)
    assert doubts(raw, job) == Doubts({"first": frozenset({13})}, rounds=1)
    assert len(job.suspects()) == 1
    end_pause(broker, raw, job.id, 0)
    second.run()
    assert (job.status().done, failed(job)) == (63, [(13, "out_of_memory")])


def damaged(raw: Redis, job_id: str) -> bytes:
    stored = raw.get(keys.chunk_input(job_id, 0))
    assert isinstance(stored, bytes)
    data = bytearray(stored)
    data[-1] ^= 1
    raw.set(keys.chunk_input(job_id, 0), bytes(data), keepttl=True)
    return bytes(data)


@pytest.mark.parametrize("names", [["first", "second"], ["alone", "alone"]])
def test_an_unreadable_input_is_dropped(broker: Broker, raw: Redis, worker: Enlist, names: Collection[str]) -> None:
    workers = {name: worker(name) for name in names}
    job_id = new_job(broker, 1)
    data = damaged(raw, job_id)
    one, other = (workers[name] for name in names)
    one.run()
    assert raw.get(keys.chunk_input(job_id, 0)) == data
    assert f"worker {one.name} can't read its input: WireForeign" in (broker.jobs.status(job_id).trouble or "")
    other.run()
    assert not raw.exists(keys.chunk_input(job_id, 0))
    assert "its input was damaged in Redis" in (broker.jobs.status(job_id).trouble or "")


def test_a_record_that_spoils_workers_is_found(settings: Settings, broker: Broker, raw: Redis, worker: Enlist) -> None:
    job = submit(settings, with_bad(13, word="sticky"))
    for at in range(4):
        one = worker(f"worker {at}")
        one.backend.falls_at = "sticky"
        one.run()
        assert (one.left, job.status().done, job.status().failed) == ([71], 0, 0)
        broker.workers.leave(row(one.name))
    found = some(doubts(raw, job))
    assert found.sick == {"worker 0": -1, "worker 1": -1, "worker 2": 13, "worker 3": 13}
    last = worker("last")
    last.backend.falls_at = "sticky"
    last.run()
    assert (job.status().done, failed(job), last.left) == (63, [(13, "encode_error")], [])
    (error,) = job.errors()
    assert error.message == "two workers could encode nothing more after this record"
