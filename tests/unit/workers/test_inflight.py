"""Overlapping batches: the next batch begins while others are in flight, as on an asynchronous device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import DeviceLost
from embedctl_config.wire import ErrorCode
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.device_use import SOLE_USE, DeviceUse, Stopped
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from tests.support.chunks import chunk_of
from tests.support.device_use import RecordedUse

TEXTS = [f"w{row}" for row in range(32)]


class Device(DummyBackend):
    """A dummy on an asynchronous device: errors of its kernels surface in `finish`."""

    def __init__(self, ahead: int, *, fails_at_once: bool = False, **options: Any) -> None:
        super().__init__(dim=4, poison=True, **options)
        self.ahead = ahead
        self.begun: list[list[int]] = []
        self.finished = 0
        self.most = 0
        self._fails_at_once = fails_at_once
        self._kernels = ThreadPoolExecutor(1)

    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        if self._fails_at_once:
            vectors = super().forward(tokens, rows)
            work: Future[Vectors] = Future()
            work.set_result(vectors)
        else:
            work = self._kernels.submit(super().forward, tokens, rows)
        self.begun.append(rows.tolist())
        self.most = max(self.most, len(self.begun) - self.finished)
        return work

    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        self.finished += 1
        return super().finish(output.result(), normalize=normalize)


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


def test_it_stops_between_two_batches_when_nobody_wants_the_rest() -> None:
    backend = Device(2)
    with pytest.raises(Stopped):
        encode(backend, TEXTS, RecordedUse(wanted=lambda: len(backend.begun) < 3))
    assert len(backend.begun) == 3


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
