"""Batches in flight on an asynchronous device: of one chunk, and of several joined into one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import DeviceLost, WorkerSick
from embedctl_config.wire import ErrorCode
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding import joining
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from embedctl_workers.encoding.joining import Launcher
from embedctl_workers.encoding.prepared import SOLE_USE, DeviceUse, Stopped
from tests.support.chunks import chunk_of
from tests.support.device_use import RecordedUse
from tests.support.waiting import PATIENCE_S, eventually

BUDGET = 64


class Device(DummyBackend):
    """A dummy on an asynchronous device, which computes one batch after the other while its gate is open.

    Errors of its kernels surface in `finish`, unless it fails at once.
    """

    def __init__(self, ahead: int, *, joins: bool = False, fails_at_once: bool = False, **options: Any) -> None:
        super().__init__(dim=4, poison=True, **options)
        self.ahead = ahead
        self.joins = self.budget_by_sum = joins
        self.gate = threading.Event()
        self.begun: list[list[int]] = []
        self.finished = self.most = 0
        self.threads: set[str] = set()
        self._fails_at_once = fails_at_once
        self._kernels = ThreadPoolExecutor(1)
        if not joins:
            self.gate.set()

    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        self.begun.append(rows.tolist())
        self.most = max(self.most, len(self.begun) - self.finished)
        self.threads.add(threading.current_thread().name)
        forward = super().forward

        def compute() -> Vectors:
            assert self.gate.wait(PATIENCE_S)
            return forward(tokens, rows)

        work = self._kernels.submit(compute)
        if self._fails_at_once:
            work.result()
        return work

    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        self.finished += 1
        return super().finish(output.result(), normalize=normalize)

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.begun]


class Chunks:
    """Chunks that several threads encode on one device."""

    def __init__(self, device: Device) -> None:
        self.device, self.encoder = device, ChunkEncoder(device, BUDGET)
        self.lock = threading.Lock()
        self.launcher = Launcher(self.lock)
        self._threads = ThreadPoolExecutor(16)

    def begin(self, texts: Sequence[str], use: DeviceUse | None = None, **options: Any) -> Future[EncodedChunk]:
        prepared = self.encoder.prepare(chunk_of(*texts), options)
        handed_over = threading.Event()
        begin = self.launcher.begin

        def noted(pieces: Any) -> None:
            begin(pieces)
            handed_over.set()

        self.launcher.begin = noted  # type: ignore[method-assign]
        done = self._threads.submit(
            self.encoder.encode, prepared, use or RecordedUse(turn=lambda: self.lock), self.launcher
        )
        assert handed_over.wait(PATIENCE_S)
        self.launcher.begin = begin  # type: ignore[method-assign]
        return done

    def occupy(self) -> Future[EncodedChunk]:
        """Give the idle device a batch of eight texts, so that it is busy."""
        done = self.begin(texts_of(9))
        eventually(lambda: self.device.sizes == [8])
        return done

    def open(self) -> None:
        self.device.gate.set()

    def close(self) -> None:
        self.open()
        self.launcher.close()
        self._threads.shutdown()
        self.device._kernels.shutdown()


Make = Callable[[], Chunks]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Chunks] = []

    def make_chunks() -> Chunks:
        made.append(Chunks(Device(2, joins=True)))
        return made[-1]

    yield make_chunks
    for each in made:
        each.close()


def texts_of(chunk: int, count: int = 8) -> list[str]:
    return [f"c{chunk} w{row}" for row in range(count)]  # two tokens each


def alone(texts: Sequence[str], **options: Any) -> Vectors:
    encoder = ChunkEncoder(DummyBackend(dim=4), 1000)
    return encoder.encode(encoder.prepare(chunk_of(*texts), options)).vectors


def test_chunks_that_wait_are_joined_and_have_the_same_vectors(make: Make) -> None:
    chunks = make()
    chunks.occupy()
    found = [chunks.begin(texts_of(chunk)) for chunk in range(9)]
    eventually(lambda: len(chunks.device.sizes) == 3)
    # Two make half a batch, which is enough while the device is busy; four make a whole one.
    assert set(chunks.device.sizes[1:]) <= {16, 24, 32}
    chunks.open()
    for chunk, each in enumerate(found):
        np.testing.assert_array_equal(each.result(PATIENCE_S).vectors, alone(texts_of(chunk)))
    assert sum(chunks.device.sizes) == 80
    assert chunks.device.threads == {"launching"}


def test_a_chunk_larger_than_the_budget_comes_in_pieces(make: Make) -> None:
    chunks = make()
    chunks.open()
    large = texts_of(0, 100)
    np.testing.assert_array_equal(chunks.begin(large).result(PATIENCE_S).vectors, alone(large))
    assert chunks.device.sizes == [32, 32, 32, 4]


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("fail-encoder", ErrorCode.ENCODE_ERROR),
        ("out-of-memory", ErrorCode.OUT_OF_MEMORY),
        ("not-a-number", ErrorCode.NON_FINITE),
    ],
)
def test_a_record_that_fails_costs_one_record(make: Make, word: str, code: ErrorCode) -> None:
    chunks = make()
    blocking = chunks.occupy()
    first, second = chunks.begin([*texts_of(0, 7), f"c0 {word}"]), chunks.begin(texts_of(1))
    eventually(lambda: len(chunks.device.sizes) == 2)
    chunks.open()
    assert [(error.row, error.code) for error in first.result(PATIENCE_S).errors] == [(7, code)]
    np.testing.assert_array_equal(first.result().vectors[:7], alone(texts_of(0, 7)))
    np.testing.assert_array_equal(second.result(PATIENCE_S).vectors, alone(texts_of(1)))
    assert not second.result().errors
    assert not blocking.result(PATIENCE_S).errors


def test_after_a_lack_of_memory_as_much_is_joined_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_TO_TRUST_AGAIN", 4)
    chunks = make()
    blocking = chunks.occupy()
    found = [chunks.begin([*texts_of(0, 7), "c0 out-of-memory"]), chunks.begin(texts_of(1))]
    eventually(lambda: len(chunks.device.sizes) == 2)
    chunks.open()
    for each in [blocking, *found]:
        each.result(PATIENCE_S)
    assert chunks.launcher._most == {id(chunks.device): 16}
    for chunk in range(9):
        chunks.begin(texts_of(chunk)).result(PATIENCE_S)
    eventually(lambda: chunks.launcher._most == {id(chunks.device): 64})


def test_a_chunk_that_nobody_wants_is_not_begun(make: Make) -> None:
    chunks = make()
    wanted = threading.Event()
    wanted.set()
    first = chunks.occupy()
    unwanted, other = chunks.begin(texts_of(1, 4), RecordedUse(wanted=wanted.is_set)), chunks.begin(texts_of(2, 4))
    wanted.clear()
    chunks.open()
    with pytest.raises(Stopped):
        unwanted.result(PATIENCE_S)
    for chunk, each, count in ((9, first, 8), (2, other, 4)):
        np.testing.assert_array_equal(each.result(PATIENCE_S).vectors, alone(texts_of(chunk, count)))
    assert sum(chunks.device.sizes) == 12


def test_chunks_of_different_options_are_not_joined(make: Make) -> None:
    chunks = make()
    blocking = chunks.occupy()
    plain = [chunks.begin(texts_of(0)), chunks.begin(texts_of(1), normalize=False), chunks.begin(texts_of(2))]
    chunks.open()
    np.testing.assert_array_equal(plain[1].result(PATIENCE_S).vectors, alone(texts_of(1), normalize=False))
    for chunk in (0, 2):
        np.testing.assert_array_equal(plain[chunk].result(PATIENCE_S).vectors, alone(texts_of(chunk)))
    blocking.result(PATIENCE_S)
    assert sorted(chunks.device.sizes) == [8, 8, 16]


def test_a_lost_device_is_told_to_every_chunk(make: Make) -> None:
    chunks = make()
    blocking = chunks.occupy()
    found = [chunks.begin([*texts_of(0, 7), "c0 lose-device"]), chunks.begin(texts_of(1))]
    eventually(lambda: len(chunks.device.sizes) == 2)
    chunks.open()
    for each in found:
        with pytest.raises(DeviceLost):
            each.result(PATIENCE_S)
    assert not blocking.result(PATIENCE_S).errors


def test_a_thread_that_ends_lets_nobody_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = make()
    first = chunks.occupy()
    monkeypatch.setattr(chunks.launcher, "_take", lambda: 1 / 0)
    second = chunks.begin(texts_of(1, 20))
    with pytest.raises(WorkerSick):
        second.result(PATIENCE_S)
    chunks.open()
    with pytest.raises(WorkerSick):  # as from now on every chunk
        first.result(PATIENCE_S)


TEXTS = [f"w{row}" for row in range(32)]


def encode(backend: DummyBackend, texts: Sequence[str], use: DeviceUse = SOLE_USE) -> EncodedChunk:
    encoder = ChunkEncoder(backend, 4)
    return encoder.encode(encoder.prepare(chunk_of(*texts), {}), use)


def expected(texts: Sequence[str]) -> Vectors:
    return encode(DummyBackend(dim=4), texts).vectors


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_no_more_batches_are_under_way_than_the_backend_wants(ahead: int) -> None:
    backend = Device(ahead)
    use = RecordedUse()
    np.testing.assert_array_equal(encode(backend, TEXTS, use).vectors, expected(TEXTS))
    assert backend.most == min(8, ahead + 1)
    assert use.batches == [4] * 8


@pytest.mark.parametrize(
    ("fails_at_once", "ahead", "at", "word", "code"),
    [
        (True, 2, 0, "fail-encoder", ErrorCode.ENCODE_ERROR),
        (False, 2, 13, "out-of-memory", ErrorCode.OUT_OF_MEMORY),
        (False, 0, 31, "not-a-number", ErrorCode.NON_FINITE),
        (False, 100, 0, "fail-encoder", ErrorCode.ENCODE_ERROR),
    ],
)
def test_a_failure_costs_one_row(*, fails_at_once: bool, ahead: int, at: int, word: str, code: ErrorCode) -> None:
    texts = [*TEXTS[:at], word, *TEXTS[at + 1 :]]
    use = RecordedUse()
    encoded = encode(Device(ahead, fails_at_once=fails_at_once), texts, use)
    assert [(error.row, error.code) for error in encoded.errors] == [(at, code)]
    others = [row for row in range(32) if row != at]
    np.testing.assert_array_equal(encoded.vectors[others], expected(TEXTS)[others])
    assert np.isnan(encoded.vectors[at]).all()
    assert sum(use.batches) == 33  # what fails is tried twice


def test_a_batch_too_large_is_halved_and_the_limit_remembered_also_when_it_fails_late() -> None:
    backend = Device(2, memory_tokens=3)
    encoder = ChunkEncoder(backend, 8)
    chunk = chunk_of(*TEXTS)
    np.testing.assert_array_equal(encoder.encode(encoder.prepare(chunk, {})).vectors, expected(TEXTS))
    backend.begun.clear()
    encoder.encode(encoder.prepare(chunk, {}))
    assert {len(rows) for rows in backend.begun} == {2}


def test_the_limit_of_a_backend_that_does_not_pad_is_a_sum_as_its_batches_are() -> None:
    backend = Device(2, memory_tokens=80)
    backend.budget_by_sum = True
    encoder = ChunkEncoder(backend, 64)
    texts = [" ".join(["w"] * 24), *(f"{text} w" for text in TEXTS[:20])]
    chunk = chunk_of(*texts)
    # 24 + 20 × 2 = 64 tokens are one batch. The device pads, so that this one, its half and a quarter are too large.
    np.testing.assert_array_equal(encoder.encode(encoder.prepare(chunk, {})).vectors, expected(texts))
    assert len(backend.begun[0]) == 21
    assert encoder.token_budget == (24 + 4 * 2) // 2


@pytest.mark.parametrize("fails_at_once", [True, False])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_lost_device_is_nobodys_error(*, fails_at_once: bool, ahead: int) -> None:
    with pytest.raises(DeviceLost):
        encode(Device(ahead, fails_at_once=fails_at_once), [*TEXTS, "lose-device"])


@pytest.mark.parametrize("fails", [False, True])
def test_the_device_is_free_for_others_while_the_last_batches_are_waited_for(*, fails: bool) -> None:
    backend = Device(2)
    turns: list[int] = []

    @contextmanager
    def turn() -> Iterator[None]:
        turns.append(-1)
        yield
        turns[-1] = backend.finished

    texts = [*TEXTS[:31], "fail-encoder"] if fails else TEXTS
    encoded = encode(backend, texts, RecordedUse(turn=turn))
    assert turns[0] == 6  # of 8 batches
    assert len(turns) == 1 + fails  # once more for the rows of the one that failed
    np.testing.assert_array_equal(encoded.vectors[:31], expected(TEXTS)[:31])
