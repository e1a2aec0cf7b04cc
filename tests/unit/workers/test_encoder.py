"""A chunk through the encoder: order restored, duplicates once, every bad record alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy._core._exceptions import _ArrayMemoryError

from embedctl_config.wire import ChunkInput, ErrorCode, RecordKind
from embedctl_workers.arrays.tokens import Rows, Side, Tokens, Vectors
from embedctl_workers.backends.base import is_out_of_memory
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from tests.support.chunks import chunk_of

BUDGET = 32


class Fake(DummyBackend):
    """The dummy, which notes what reaches the device and fails where the words of a text tell it to."""

    def __init__(self) -> None:
        super().__init__(dim=4, max_tokens=8)
        self.batches: list[list[int]] = []
        self.tokenized: list[list[str]] = []
        self._texts: Sequence[str] = ()

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        self.tokenized.append(list(texts))
        if any("untokenisable" in text for text in texts):
            raise ValueError("no tokens\nsecond line with the text")
        self._texts = texts
        return super().tokenize(texts, prompt, truncation_side)

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        self.batches.append(rows.tolist())
        words = [self._texts[row] for row in rows]
        if any("poison" in text for text in words):
            raise RuntimeError(f"kernel failed {'x' * 500}")
        vectors = super().forward(tokens, rows)
        vectors[["nan" in text for text in words], 1] = np.nan
        vectors[["infinite" in text for text in words], 0] = np.inf
        return vectors

    @property
    def rows_seen(self) -> int:
        return sum(map(len, self.batches))


def run(backend: DummyBackend, chunk: ChunkInput, *, budget: int = BUDGET, **options: Any) -> EncodedChunk:
    encoder = ChunkEncoder(backend, budget)
    return encoder.encode(encoder.prepare(chunk, options))


def alone(text: str, prompt: str | None = None, *, normalize: bool = True) -> Vectors:
    backend = DummyBackend(dim=4, max_tokens=8)
    vectors = backend.finish(backend.forward(backend.tokenize([text], prompt), np.array([0])), normalize=normalize)
    return vectors.reshape(-1)


def codes(encoded: EncodedChunk) -> dict[int, ErrorCode]:
    return {error.row: error.code for error in encoded.errors}


def assert_vectors(encoded: EncodedChunk, texts: Sequence[str], failed: Sequence[int] = ()) -> None:
    assert encoded.vectors.dtype == np.float32
    for row, text in enumerate(texts):
        if row in failed:
            assert np.isnan(encoded.vectors[row]).all()
        else:
            np.testing.assert_allclose(encoded.vectors[row], alone(text), rtol=1e-6)


def test_each_record_has_the_number_of_its_own_tokens() -> None:
    texts = ["same words", "one", "same words", "", "poison", "one two " * 8]
    assert run(Fake(), chunk_of(*texts)).counts.tolist() == [2, 1, 2, 0, 0, 8]
    # The dummy's windows are 8 tokens long, and have no special ones.
    assert run(DummyBackend(dim=4, max_tokens=8), chunk_of(*texts), long="mean").counts.tolist() == [
        *(2, 1, 2, 0, 1, 16)
    ]
    assert run(Fake(), chunk_of("one", "one two " * 8), long="error").counts.tolist() == [1, 0]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_error_of_a_text_is_copied_to_each_of_its_positions() -> None:
    texts = ["poison", "fine", "poison", "nan", "nan", "infinite"]
    encoded = run(Fake(), chunk_of(*texts))
    assert codes(encoded) == {
        0: ErrorCode.ENCODE_ERROR,
        2: ErrorCode.ENCODE_ERROR,
        3: ErrorCode.NON_FINITE,
        4: ErrorCode.NON_FINITE,
        5: ErrorCode.NON_FINITE,
    }
    assert [error.row for error in encoded.errors] == [0, 2, 3, 4, 5]
    assert_vectors(encoded, texts, failed=[0, 2, 3, 4, 5])


def test_records_that_are_no_text_never_reach_the_backend() -> None:
    kinds = {1: RecordKind.NOT_TEXT, 2: RecordKind.INVALID_UTF8, 3: RecordKind.OVERSIZE}
    backend = Fake()
    encoded = run(backend, chunk_of("good", b"int", b"\xff", b"123456", "", " \t\r\n ", kinds=kinds))
    assert codes(encoded) == {
        1: ErrorCode.NOT_TEXT,
        2: ErrorCode.INVALID_UTF8,
        3: ErrorCode.TOO_LONG,
        4: ErrorCode.EMPTY,
        5: ErrorCode.EMPTY,
    }
    messages = {error.row: error.message for error in encoded.errors}
    assert messages[1] == "the text field holds a number, not text"
    assert "123456 bytes" in messages[3]
    assert backend.tokenized == [["good"]]
    assert_vectors(encoded, ["good", *[""] * 5], failed=[1, 2, 3, 4, 5])


def test_texts_that_are_too_long_fail_where_the_job_says_so() -> None:
    backend = Fake()
    encoded = run(backend, chunk_of("short", "a b c d e f g h i j k", "a b c d e f g h"), long="error")
    assert codes(encoded) == {1: ErrorCode.TOO_LONG}
    assert "11 tokens" in encoded.errors[0].message
    assert "8" in encoded.errors[0].message
    assert encoded.truncations == []
    assert backend.rows_seen == 2


def test_a_poison_row_is_found_by_halving_and_the_others_keep_their_vectors() -> None:
    texts = [f"word{row}" for row in range(32)]
    texts[19] = "poison"
    backend = Fake()
    encoded = run(backend, chunk_of(*texts))
    assert codes(encoded) == {19: ErrorCode.ENCODE_ERROR}
    assert_vectors(encoded, texts, failed=[19])
    assert len(backend.batches) == 1 + 2 * 5 + 1  # once more alone
    assert sum(1 for batch in backend.batches if 19 in batch) == 7
    assert encoded.doubtful == {19}


def test_the_prompt_and_the_length_of_vectors_are_the_jobs() -> None:
    encoded = run(Fake(), chunk_of("text"), prompt="query: ", normalize=False)
    np.testing.assert_array_equal(encoded.vectors[0], alone("text", "query: ", normalize=False))
    assert not np.isclose(np.linalg.norm(encoded.vectors[0]), 1)


def memory(tokens: int, **changes: Any) -> DummyBackend:
    return DummyBackend(dim=4, max_tokens=64, memory_tokens=tokens, **changes)


class Batches:
    """The rows × longest row of each batch that the device was given, in order; too large ones included."""

    def __init__(self, backend: DummyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        forward = backend.forward

        def noting(tokens: Tokens, rows: Rows) -> Vectors:
            self.sizes.append(len(rows) * int(tokens.lengths[rows].max()))
            return forward(tokens, rows)

        monkeypatch.setattr(backend, "forward", noting)


def test_a_batch_too_large_for_the_memory_is_halved_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = memory(40)
    batches, encoder = Batches(backend, monkeypatch), ChunkEncoder(backend, 128)
    texts = [f"w{row} w w w" for row in range(32)]
    first = encoder.encode(encoder.prepare(chunk_of(*texts), {}))
    assert first.errors == []
    assert batches.sizes == [128, 64, 32, 32, 64, 32, 32]
    batches.sizes.clear()
    again = encoder.encode(encoder.prepare(chunk_of(*texts), {}))
    assert batches.sizes == [32] * 4
    np.testing.assert_array_equal(first.vectors, again.vectors)
    assert_vectors(again, texts)


@pytest.mark.parametrize(
    ("word", "code"), [("out-of-memory", ErrorCode.OUT_OF_MEMORY), ("fail-encoder", ErrorCode.ENCODE_ERROR)]
)
def test_a_row_that_fails_says_nothing_of_memory(word: str, code: ErrorCode, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = memory(0, poison=True)
    batches, encoder = Batches(backend, monkeypatch), ChunkEncoder(backend, 32)
    texts = [f"w{row}" for row in range(32)]
    texts[11] = word
    encoded = encoder.encode(encoder.prepare(chunk_of(*texts), {}))
    assert codes(encoded) == {11: code}
    assert_vectors(encoded, texts, failed=[11])
    batches.sizes.clear()
    encoder.encode(encoder.prepare(chunk_of(*(f"v{row}" for row in range(32))), {}))
    assert batches.sizes == [32]


def test_a_row_too_large_does_not_hide_a_batch_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = memory(10)
    batches, encoder = Batches(backend, monkeypatch), ChunkEncoder(backend, 64)
    texts = [" ".join(["long"] * 12), *(f"w{row} w w" for row in range(20))]
    encoded = encoder.encode(encoder.prepare(chunk_of(*texts), {}))
    assert codes(encoded) == {0: ErrorCode.OUT_OF_MEMORY}
    assert "MemoryError" in encoded.errors[0].message
    batches.sizes.clear()
    encoder.encode(encoder.prepare(chunk_of(*texts[1:]), {}))
    assert max(batches.sizes) <= 10


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (_ArrayMemoryError((2**40,), np.dtype("f4")), True),
        # c10/core/impl/alloc_cpu.cpp, as torch raises it on a CPU.
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("kernel failed"), False),
        (ValueError("memory"), False),
        (OSError(12, "no swap"), False),
    ],
    ids=str,
)
def test_running_out_of_memory_is_told_by_what_the_runtimes_raise(error: Exception, *, memory: bool) -> None:
    assert is_out_of_memory(error) is memory


def windowed(backend: DummyBackend, texts: Sequence[str], *, budget: int = BUDGET, **options: Any) -> EncodedChunk:
    return run(backend, chunk_of(*texts), budget=budget, long="mean", **options)


def mean_by_hand(text: str, prompt: str = "") -> Vectors:
    """Of the vectors of each eight words, weighted by how many they are."""
    words = (prompt + text).split()
    parts = [words[at : at + 8] for at in range(0, len(words), 8)]
    vectors = [alone(" ".join(part), normalize=False) for part in parts]
    return np.average(np.array(vectors, np.float64), axis=0, weights=[len(part) for part in parts])


LONG_AND_SHORT = [
    " ".join(f"w{row}-{at}" for at in range(count)) for row, count in enumerate([3, 20, 8, 9, 1, 100, 16])
]


@pytest.mark.parametrize("budget", [8, 16, 32, 1000])
def test_the_mean_of_a_long_text_is_that_of_its_windows_by_their_tokens(budget: int) -> None:
    backend = Counting()
    encoded = windowed(backend, LONG_AND_SHORT, budget=budget, normalize=False)
    expected = [mean_by_hand(text) for text in LONG_AND_SHORT]
    np.testing.assert_allclose(encoded.vectors, expected, rtol=0, atol=1e-6)
    assert encoded.vectors.dtype == np.float32
    assert (encoded.errors, encoded.truncations) == ([], [])
    assert encoded.tokens == sum(len(text.split()) for text in LONG_AND_SHORT)
    assert sum(backend.rows) == 1 + 3 + 1 + 2 + 1 + 13 + 2
    assert backend.most <= budget


class Counting(DummyBackend):
    """The dummy, which notes how many rows it gets at once, and the most tokens with padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dim=4, max_tokens=8, **options)
        self.rows: list[int] = []
        self.most = 0
        self.prompts: list[tuple[int | None, int]] = []

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        self.rows.append(len(rows))
        self.most = max(self.most, len(rows) * int(tokens.lengths[rows].max()))
        self.prompts += [(tokens.prompt_tokens, len(tokens.columns["input_ids"][row])) for row in rows]
        return super().forward(tokens, rows)


def test_a_prompt_that_pooling_leaves_out_is_left_out_of_the_first_windows_alone() -> None:
    class LeavesOut(Counting):
        def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
            return replace(super().tokenize(texts, prompt, truncation_side), prompt_tokens=2)

    backend = LeavesOut()
    windowed(backend, LONG_AND_SHORT, prompt="a prompt ")
    assert len([length for left_out, length in backend.prompts if left_out == 2]) == len(LONG_AND_SHORT)
    later = [length for left_out, length in backend.prompts if left_out is None]
    assert sorted(later) == sorted([8, 6, 2, 3, *[8] * 11, 6, 8, 2])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("fail-encoder", ErrorCode.ENCODE_ERROR),
        ("out-of-memory", ErrorCode.OUT_OF_MEMORY),
        ("not-a-number", ErrorCode.NON_FINITE),
        ("fail-tokenizer", ErrorCode.ENCODE_ERROR),
    ],
)
def test_a_window_that_fails_fails_its_record_alone(word: str, code: ErrorCode) -> None:
    texts = list(LONG_AND_SHORT)
    texts[5] = texts[5].replace("w5-61", word)
    encoded = windowed(Counting(poison=True), texts, budget=16, normalize=False)
    assert codes(encoded) == {5: code}
    assert np.isnan(encoded.vectors[5]).all()
    for row in (0, 1, 2, 3, 4, 6):
        np.testing.assert_allclose(encoded.vectors[row], mean_by_hand(texts[row]), rtol=0, atol=1e-6)


PROMPTS = {"query": "what is", "nothing": ""}


@pytest.mark.parametrize(
    ("prompts", "options", "code", "told"),
    [
        (
            PROMPTS,
            {"prompt_name": "x"},
            ErrorCode.NO_PROMPT,
            "no prompt 'x': model mine has the prompts nothing, query",
        ),
        (
            {},
            {"prompt_name": "x"},
            ErrorCode.NO_PROMPT,
            "no prompt 'x': model mine has no prompts with names: use prompt",
        ),
        ({}, {"dimensions": 5}, ErrorCode.NO_DIMENSIONS, "5 dimensions asked for, and the model's vectors have 4"),
        (
            {},
            {"dimensions": 10**12},
            ErrorCode.NO_DIMENSIONS,
            f"{10**12} dimensions asked for, and the model's vectors have 4",
        ),
    ],
)
def test_an_option_that_the_model_can_not_follow_fails_every_record(
    prompts: dict[str, str], options: dict[str, Any], code: ErrorCode, told: str
) -> None:
    backend = Fake()
    encoder = ChunkEncoder(backend, BUDGET, model="mine", prompts=prompts)
    encoded = encoder.encode(encoder.prepare(chunk_of("one", "", "two"), options))
    assert codes(encoded) == {0: code, 1: ErrorCode.EMPTY, 2: code}
    assert encoded.errors[0].message == told
    assert np.isnan(encoded.vectors).all()
    assert backend.batches == []


def test_the_side_that_a_long_text_loses_may_be_chosen() -> None:
    words = [f"w{at}" for at in range(12)]
    text = " ".join(words)
    for side, kept in (("left", words[-8:]), ("right", words[:8]), (None, words[:8])):
        encoded = run(Fake(), chunk_of(text), long=f"cut-{side}")
        np.testing.assert_array_equal(encoded.vectors[0], alone(" ".join(kept)))
        assert [(each.used, each.lost) for each in encoded.truncations] == [(8, 4)]


def test_vectors_of_a_model_that_was_not_trained_for_it_are_cut_only_anyway() -> None:
    encoder = ChunkEncoder(Fake(), BUDGET)
    encoder.matryoshka = False
    cut: dict[str, Any] = {"dimensions": 3}
    for options, failed in ((cut, 1), ({"dimensions": 4}, 0), ({**cut, "dims_anyway": True}, 0)):
        assert len(encoder.encode(encoder.prepare(chunk_of("one"), options)).errors) == failed


@pytest.mark.parametrize("dimensions", [1, 3, 4])
def test_fewer_dimensions_are_the_first_ones_made_to_unit_length(dimensions: int) -> None:
    encoded = run(Fake(), chunk_of("one", "two words"), dimensions=dimensions)
    assert encoded.vectors.shape == (2, dimensions)
    assert encoded.vectors.dtype == np.float32
    for row, text in enumerate(["one", "two words"]):
        cut = alone(text, normalize=False)[:dimensions].astype(np.float64)
        np.testing.assert_allclose(encoded.vectors[row], cut / np.linalg.norm(cut), rtol=0, atol=1e-7)
    raw = run(Fake(), chunk_of("one", "two words"), dimensions=dimensions, normalize=False).vectors
    np.testing.assert_array_equal(raw[0], alone("one", normalize=False)[:dimensions])
