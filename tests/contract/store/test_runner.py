"""What a runner tells of a chunk: to its telemetry all that happens, to its log no word of a text."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from embedctl_workers.arrays.tokens import Rows, Side, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.rig import SECRET, TEXTS, Rig
from tests.support.store import some, take
from tests.support.waiting import PATIENCE_S


class Quoting(DummyBackend):
    """A backend that quotes texts as it fails, in one of its methods.

    Attributes:
        place: the method; empty for none.
        spares: whether it fails with short texts alone, and so not with that of the worker's own.
    """

    place, spares = "", False

    def _fail_in(self, place: str, words: int) -> None:
        if place == self.place and not (self.spares and words > 10):
            try:
                dict[str, str]()[SECRET]
            except KeyError as error:
                raise ValueError(f"can't work with {TEXTS if 0 < words < 10 else words}") from error

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        self._fail_in("tokenize", max(len(text.split()) for text in texts))
        return super().tokenize(texts, prompt, truncation_side)

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        self._fail_in("forward", int(tokens.lengths[rows].max()))
        return super().forward(tokens, rows)

    def positions(self, lengths: Rows) -> int:
        self._fail_in("positions", int(lengths.max()))
        return super().positions(lengths)


@pytest.fixture
def rig(broker: Broker, settings: Settings) -> Rig:
    return Rig(broker, settings, DummyBackend(dim=16))


@pytest.fixture
def failing(request: pytest.FixtureRequest, broker: Broker, settings: Settings) -> Rig:
    backend = Quoting(dim=16)
    rig = Rig(broker, settings, backend)
    backend.place = request.param
    return rig


def about(line: logging.LogRecord) -> tuple[object, ...]:
    return tuple(vars(line)[name] for name in ("job", "chunk", "attempt"))


def test_a_chunk_is_counted_as_what_became_of_it(rig: Rig) -> None:
    job = rig.submit(["one", "", "three words here", "one"])
    assert rig.run() == f"job {job.id}, chunk 0"
    assert rig.run() == "nothing was ready"
    assert job.status().done == 3
    assert (rig.value("records_total", outcome="done"), rig.value("records_total", outcome="failed")) == (3, 1)
    assert rig.value("record_errors_total", code="empty") == 1
    assert (rig.value("tokens_total"), rig.value("padding_tokens_total")) == (4, 2)
    assert rig.value("tokens_total") == job.status().tokens
    assert rig.value("attempts_total", attempt="first") == 1
    assert rig.value("batch_seconds_count") == 1
    assert [rig.value("stage_seconds_count", stage=stage) for stage in ("tokenise", "encode", "store")] == [1, 1, 1]
    assert rig.value("queue_wait_seconds_count") == 1
    speed = rig.runner.speed["dummy"]
    assert speed.rows_per_s > 0
    assert speed.padding == pytest.approx(2 / 6)
    assert rig.runner.in_hand.progressed_ms > 0


def test_a_later_attempt_counts_as_a_repeated_one(rig: Rig, broker: Broker) -> None:
    job = rig.submit()
    claim = some(take(broker, fingerprint=rig.backend.fingerprint))
    assert claim.attempt == 1
    broker.jobs.release(job.id, 0, "t", delay_s=0)
    rig.run()
    assert (rig.value("attempts_total", attempt="first"), rig.value("attempts_total", attempt="repeated")) == (0, 1)


def test_how_long_a_job_waited_is_counted_in_seconds_since_its_last_turn(rig: Rig, broker: Broker, raw: Redis) -> None:
    job = rig.submit()
    (waiting,) = raw.scan_iter(keys.turns("wait:*"))
    raw.zadd(waiting, {job.id: broker.connection.now_ms() - 5000}, xx=True)
    rig.run()
    assert 5 <= (rig.value("queue_wait_seconds_sum") or 0) < PATIENCE_S  # and not milliseconds


def test_a_failure_hides_its_text(rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def quoting(*args: object) -> bytes:
        raise ValueError(f"can't work with {TEXTS}")

    monkeypatch.setattr(wire, "encode_result", quoting)
    job = rig.submit()
    rig.run()
    assert rig.value("chunk_failures_total") == 1
    assert SECRET not in caplog.text
    assert "the chunk failed (ValueError), and will be offered again" in caplog.text
    assert "in quoting" in caplog.text  # of the traceback
    (line,) = [record for record in caplog.records if "the chunk failed" in record.getMessage()]
    assert about(line) == (job.id, 0, 1)
    trouble = job.status().trouble or ""
    assert SECRET not in trouble
    assert "chunk 0: ValueError in quoting (test_runner.py, line " in trouble
    assert rig.left == []


@pytest.mark.parametrize("failing", ["tokenize", "forward", "positions"], indirect=True)
def test_a_worker_that_is_sick_blames_no_record(failing: Rig, raw: Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    job = failing.submit()
    failing.run()
    assert failing.left == [71]
    assert failing.runner.draining.is_set()
    status = job.status()
    assert (status.done, status.failed, status.deaths) == (0, 0, 0)
    assert "chunk 0: worker me: WorkerSick: this worker can't encode a text of its own: " in (status.trouble or "")
    assert raw.hlen(keys.owners(job.id)) == 0
    assert SECRET not in caplog.text + (status.trouble or "")
    assert failing.run() == "nothing was ready"  # the chunk is for another worker
    assert job.status().claims == 1


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("tokenize", "the chunk failed as a whole (ValueError): encoding it record by record"),
        ("positions", "the chunk failed as a whole (ValueError): encoding it record by record"),
        ("forward", "halving it"),
    ],
    indirect=["failing"],
)
def test_failed_records_are_told_without_texts(failing: Rig, caplog: pytest.LogCaptureFixture, said: str) -> None:
    caplog.set_level(logging.DEBUG)
    assert isinstance(failing.backend, Quoting)
    failing.backend.spares = True
    job = failing.submit()
    failing.run()
    assert (job.status().failed, failing.left) == (3, [])
    assert failing.value("record_errors_total", code="encode_error") == 3
    assert SECRET not in caplog.text
    lines = [record for record in caplog.records if said in record.getMessage()]
    assert "(ValueError)" in lines[0].getMessage()
    assert {about(line) for line in lines} == {(job.id, 0, 1)}


def test_a_result_that_redis_refuses_is_given_back(rig: Rig, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    job, forward = rig.submit(), rig.backend.forward

    def spoil(tokens: Tokens, rows: Rows) -> Vectors:
        raw.lpush(keys.counted(job.id), "somebody else's")  # `complete` counts the chunk there
        return forward(tokens, rows)

    monkeypatch.setattr(rig.backend, "forward", spoil)
    rig.run()
    assert "WRONGTYPE" in (job.status().trouble or "")
    assert not rig.runner.in_hand.all()
