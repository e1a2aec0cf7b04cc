"""A chunk through the encoder: order restored, duplicates once, every bad record alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from embedctl_config.wire import ChunkInput, ErrorCode, RecordKind
from embedctl_workers.backends.base import Rows, Tokens, Vectors, is_out_of_memory
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoder import ChunkEncoder, EncodedChunk, Stopped

BUDGET = 32


class Fake(DummyBackend):
    """The dummy, which notes what reaches the device and fails where the words of a text tell it to."""

    def __init__(self) -> None:
        super().__init__(dim=4, max_tokens=8)
        self.batches: list[list[int]] = []
        self.tokenized: list[list[str]] = []
        self._texts: Sequence[str] = ()

    def tokenize(self, texts: Sequence[str], prompt: str | None) -> Tokens:
        self.tokenized.append(list(texts))
        if any("untokenisable" in text for text in texts):
            raise ValueError("no tokens\nsecond line with the text")
        self._texts = texts
        return super().tokenize(texts, prompt)

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


def chunk_of(*texts: str | bytes, kinds: dict[int, RecordKind] | None = None) -> ChunkInput:
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    return ChunkInput(0, bytes((kinds or {}).get(row, RecordKind.TEXT) for row in range(len(data))), data)


def run(backend: DummyBackend, chunk: ChunkInput, *, budget: int = BUDGET, **options: Any) -> EncodedChunk:
    encoder = ChunkEncoder(backend, budget)
    return encoder.encode(encoder.prepare(chunk, options))


def alone(text: str, prompt: str | None = None, *, normalize: bool = True) -> Vectors:
    backend = DummyBackend(dim=4, max_tokens=8)
    return backend.finish(backend.forward(backend.tokenize([text], prompt), np.array([0])), normalize=normalize)[0]


def codes(encoded: EncodedChunk) -> dict[int, ErrorCode]:
    return {error.row: error.code for error in encoded.errors}


def assert_vectors(encoded: EncodedChunk, texts: Sequence[str], failed: Sequence[int] = ()) -> None:
    assert encoded.vectors.dtype == np.float32
    for row, text in enumerate(texts):
        if row in failed:
            assert np.isnan(encoded.vectors[row]).all()
        else:
            np.testing.assert_allclose(encoded.vectors[row], alone(text), rtol=1e-6)


def test_vectors_stand_in_the_order_of_the_records() -> None:
    texts = [" ".join(f"w{row}-{at}" for at in range(1 + row * 5 % 8)) for row in range(40)]
    backend = Fake()
    encoded = run(backend, chunk_of(*texts))
    assert len(backend.batches) > 3
    assert_vectors(encoded, texts)
    assert encoded.errors == []
    assert encoded.tokens == sum(len(text.split()) for text in texts)


def test_duplicates_reach_the_device_once() -> None:
    backend = Fake()
    texts = ["same words", "other", "same words", "same words", "other", "Same words"]
    encoded = run(backend, chunk_of(*texts))
    assert backend.rows_seen == 3
    assert_vectors(encoded, texts)
    assert encoded.tokens == 5


def test_the_error_of_a_text_is_copied_to_each_of_its_positions() -> None:
    texts = ["poison", "fine", "poison", "nan", "nan"]
    encoded = run(Fake(), chunk_of(*texts))
    assert codes(encoded) == {
        0: ErrorCode.ENCODE_ERROR,
        2: ErrorCode.ENCODE_ERROR,
        3: ErrorCode.NON_FINITE,
        4: ErrorCode.NON_FINITE,
    }
    assert [error.row for error in encoded.errors] == [0, 2, 3, 4]
    assert_vectors(encoded, texts, failed=[0, 2, 3, 4])


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
    assert "int" in messages[1]
    assert "123456 bytes" in messages[3]
    assert backend.tokenized == [["good"]]
    assert_vectors(encoded, ["good", *[""] * 5], failed=[1, 2, 3, 4, 5])


def test_the_same_bytes_as_text_and_as_no_text_stay_apart() -> None:
    encoded = run(Fake(), chunk_of("int", b"int", kinds={1: RecordKind.NOT_TEXT}))
    assert codes(encoded) == {1: ErrorCode.NOT_TEXT}
    assert_vectors(encoded, ["int", ""], failed=[1])


def test_texts_that_are_too_long_are_cut_and_reported() -> None:
    long = "a b c d e f g h i j k"
    encoded = run(Fake(), chunk_of("short", long, long))
    assert [(cut.row, cut.used, cut.lost) for cut in encoded.truncations] == [(1, 8, 3), (2, 8, 3)]
    assert encoded.errors == []
    assert_vectors(encoded, ["short", long, long])


def test_texts_that_are_too_long_fail_where_the_job_says_so() -> None:
    backend = Fake()
    encoded = run(backend, chunk_of("short", "a b c d e f g h i j k", "a b c d e f g h"), truncation="error")
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
    assert len(backend.batches) == 1 + 2 * 5
    assert sum(1 for batch in backend.batches if 19 in batch) == 6


def test_several_poison_rows_in_one_batch_fail_alone() -> None:
    texts = [f"poison{row}" if row in (0, 7, 8, 31) else f"word{row}" for row in range(32)]
    encoded = run(Fake(), chunk_of(*texts))
    assert sorted(codes(encoded)) == [0, 7, 8, 31]
    assert_vectors(encoded, texts, failed=[0, 7, 8, 31])


def test_an_error_names_its_kind_and_is_cut_short() -> None:
    (error,) = run(Fake(), chunk_of("poison")).errors
    assert "RuntimeError: kernel failed" in error.message
    assert len(error.message) < 300


def test_a_text_that_breaks_the_tokeniser_fails_alone() -> None:
    texts = ["one", "untokenisable text", "three", "untokenisable text"]
    encoded = run(Fake(), chunk_of(*texts))
    assert codes(encoded) == {1: ErrorCode.ENCODE_ERROR, 3: ErrorCode.ENCODE_ERROR}
    assert "the tokeniser failed: ValueError: no tokens" in encoded.errors[0].message
    assert "second line" not in encoded.errors[0].message
    assert_vectors(encoded, texts, failed=[1, 3])
    assert encoded.tokens == 2


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("word", ["nan", "infinite"])
def test_output_that_is_not_finite_fails_its_row_alone(word: str) -> None:
    texts = ["one", word, "three"]
    encoded = run(Fake(), chunk_of(*texts))
    assert codes(encoded) == {1: ErrorCode.NON_FINITE}
    assert_vectors(encoded, texts, failed=[1])


def test_a_truncated_record_that_fails_is_not_reported_as_truncated() -> None:
    encoded = run(Fake(), chunk_of("poison b c d e f g h i j", "a b c d e f g h i"))
    assert codes(encoded) == {0: ErrorCode.ENCODE_ERROR}
    assert [cut.row for cut in encoded.truncations] == [1]


def test_a_chunk_of_bad_records_alone_touches_neither_tokeniser_nor_device() -> None:
    backend = Fake()
    encoded = run(backend, chunk_of("", " ", b"int", kinds={2: RecordKind.NOT_TEXT}))
    assert len(encoded.errors) == 3
    assert encoded.vectors.shape == (3, 4)
    assert np.isnan(encoded.vectors).all()
    assert (backend.batches, backend.tokenized, encoded.tokens) == ([], [], 0)


def test_a_chunk_whose_texts_all_break_the_tokeniser_still_ends() -> None:
    encoded = run(Fake(), chunk_of("untokenisable", "untokenisable too"))
    assert sorted(codes(encoded)) == [0, 1]
    assert np.isnan(encoded.vectors).all()


def test_an_empty_chunk_has_no_vectors_and_no_errors() -> None:
    encoded = run(Fake(), chunk_of())
    assert encoded.vectors.shape == (0, 4)
    assert (encoded.errors, encoded.truncations, encoded.tokens) == ([], [], 0)


def test_nobody_wanting_the_chunk_stops_it_between_two_batches() -> None:
    backend = Fake()
    encoder = ChunkEncoder(backend, 4)
    prepared = encoder.prepare(chunk_of(*(f"w{row}" for row in range(20))), {})
    wanted: Iterator[bool] = iter([True, True, False])
    with pytest.raises(Stopped):
        encoder.encode(prepared, wanted=lambda: next(wanted))
    assert len(backend.batches) == 2


def test_progress_is_told_after_each_batch() -> None:
    encoder = ChunkEncoder(Fake(), 4)
    told: list[int] = []
    encoder.encode(encoder.prepare(chunk_of("a b c", "d", "e f", "g"), {}), on_batch=told.append)
    assert told == [3, 3, 1]


def test_the_prompt_and_the_length_of_vectors_are_the_jobs() -> None:
    encoded = run(Fake(), chunk_of("text"), prompt="query: ", normalize=False)
    np.testing.assert_array_equal(encoded.vectors[0], alone("text", "query: ", normalize=False))
    assert not np.isclose(np.linalg.norm(encoded.vectors[0]), 1)


def test_a_batch_never_holds_more_than_the_token_budget() -> None:
    backend = Fake()
    texts = [" ".join([f"w{row}"] * (row % 8 + 1)) for row in range(30)]
    run(backend, chunk_of(*texts), budget=16)
    for batch in backend.batches:
        assert len(batch) * max(len(texts[row].split()) for row in batch) <= 16


def memory(tokens: int, **changes: Any) -> DummyBackend:
    """A device that has room for a batch of so many tokens."""
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


def test_a_batch_too_large_for_the_memory_is_halved_and_none_so_large_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_the_limit_is_learned_downwards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = memory(16)
    batches, encoder = Batches(backend, monkeypatch), ChunkEncoder(backend, 64)
    encoder.encode(encoder.prepare(chunk_of(*(f"w{row} w w w" for row in range(16))), {}))
    batches.sizes.clear()
    # Rows of other lengths fill the budget otherwise, but never beyond it.
    encoder.encode(encoder.prepare(chunk_of(*(f"w{row}" for row in range(50))), {}))
    assert max(batches.sizes) == 16


def test_a_row_too_large_by_itself_fails_alone_and_says_nothing_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = memory(0, poison=True)
    batches, encoder = Batches(backend, monkeypatch), ChunkEncoder(backend, 32)
    texts = [f"w{row}" for row in range(32)]
    texts[11] = "out-of-memory"
    encoded = encoder.encode(encoder.prepare(chunk_of(*texts), {}))
    assert codes(encoded) == {11: ErrorCode.OUT_OF_MEMORY}
    assert_vectors(encoded, texts, failed=[11])
    batches.sizes.clear()
    encoder.encode(encoder.prepare(chunk_of(*(f"v{row}" for row in range(32))), {}))
    assert batches.sizes == [32]


def test_a_row_too_large_by_itself_does_not_hide_that_the_batch_is_too_large_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = memory(10)
    batches, encoder = Batches(backend, monkeypatch), ChunkEncoder(backend, 64)
    texts = [" ".join(["long"] * 12), *(f"w{row} w w" for row in range(20))]
    encoded = encoder.encode(encoder.prepare(chunk_of(*texts), {}))
    assert codes(encoded) == {0: ErrorCode.OUT_OF_MEMORY}
    assert "MemoryError" in encoded.errors[0].message
    batches.sizes.clear()
    encoder.encode(encoder.prepare(chunk_of(*texts[1:]), {}))
    assert max(batches.sizes) <= 10


def test_a_failure_of_another_kind_says_nothing_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DummyBackend(dim=4, poison=True)
    batches, encoder = Batches(backend, monkeypatch), ChunkEncoder(backend, 32)
    encoder.encode(encoder.prepare(chunk_of("fail-encoder", *(f"w{row}" for row in range(31))), {}))
    batches.sizes.clear()
    encoder.encode(encoder.prepare(chunk_of(*(f"v{row}" for row in range(32))), {}))
    assert batches.sizes == [32]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        np._core._exceptions._ArrayMemoryError((2**40,), np.dtype("f4")),
        # c10/core/impl/alloc_cpu.cpp, as torch raises it on a CPU.
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)"
        ),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
    ids=["python", "numpy", "torch on a CPU", "torch on a GPU"],
)
def test_running_out_of_memory_is_told_by_what_the_runtimes_raise(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("kernel failed"), ValueError("memory"), OSError(12, "no swap")])
def test_other_failures_are_not_taken_for_want_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_what_torch_raises_today_is_told_too() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
