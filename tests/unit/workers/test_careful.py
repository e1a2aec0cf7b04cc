"""A suspect chunk: record by record, each announced before anything is done with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from embedctl_config.wire import ChunkInput, ErrorCode, RecordKind
from embedctl_workers.arrays.tokens import Rows, Side, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.careful import CarefulUse, encode_carefully
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from tests.support.chunks import chunk_of


class Noting(DummyBackend):
    """The dummy, which notes the texts that it is given and has the words of poison act where they harm no process."""

    def __init__(self, notes: list[object]) -> None:
        super().__init__(dim=4, max_tokens=8, poison=True)
        self._notes = notes
        self._texts: Sequence[str] = ()

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        self._notes += [f"tokenise {text}" for text in texts]
        self._texts = texts
        return super().tokenize(texts, prompt, truncation_side)

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        self._notes += [f"encode {self._texts[row]}" for row in rows]
        return super().forward(tokens, rows)


class NotingUse(CarefulUse):
    def __init__(self, notes: list[object], given_up: Collection[int] = ()) -> None:
        self._notes, self.given_up = notes, given_up

    def announce(self, row: int) -> None:
        self._notes.append(row)


def carefully(
    chunk: ChunkInput, notes: list[object] | None = None, *, given_up: Collection[int] = (), **options: Any
) -> EncodedChunk:
    """Encode with care; `notes` gets every announced row and every text that the backend touches, in order."""
    notes = [] if notes is None else notes
    return encode_carefully(ChunkEncoder(Noting(notes), 32), chunk, options, NotingUse(notes, given_up))


def plainly(chunk: ChunkInput, **options: Any) -> EncodedChunk:
    encoder = ChunkEncoder(Noting([]), 32)
    return encoder.encode(encoder.prepare(chunk, options))


def facts(encoded: EncodedChunk) -> list[tuple[int, ...]]:
    return [(cut.row, cut.used, cut.lost) for cut in encoded.truncations]


def failures(encoded: EncodedChunk) -> list[tuple[int, ErrorCode]]:
    return [(error.row, error.code) for error in encoded.errors]


def test_each_row_is_announced_before_it_is_touched_and_the_end_after_the_last() -> None:
    notes: list[object] = []
    carefully(chunk_of("a", "b"), notes)
    assert notes == [0, "tokenise a", "encode a", 1, "tokenise b", "encode b", -1]


def test_rows_given_up_are_neither_announced_nor_touched_and_fail_alone() -> None:
    notes: list[object] = []
    encoded = carefully(chunk_of("a", "crash-tokenizer", "c", "crash-encoder", "e"), notes, given_up={1, 3})
    assert [note for note in notes if isinstance(note, int)] == [0, 2, 4, -1]
    assert not any("crash" in str(note) for note in notes)
    assert failures(encoded) == [(1, ErrorCode.CRASHED_WORKER), (3, ErrorCode.CRASHED_WORKER)]
    assert np.isnan(encoded.vectors[[1, 3]]).all()
    np.testing.assert_array_equal(encoded.vectors[[0, 2, 4]], plainly(chunk_of("a", "c", "e")).vectors)


def test_poisonous_rows_fail_untouched_and_named_ones_come_first_with_the_worker_checked_around_each() -> None:
    notes: list[object] = []

    class Checking(NotingUse):
        poisonous, first = frozenset({1}), frozenset({4})

        def check(self) -> None:
            notes.append("check")

    chunk = chunk_of("a", "sticky", "c", "sticky", "e")
    encoded = encode_carefully(ChunkEncoder(Noting(notes), 32), chunk, {}, Checking(notes))
    assert [note for note in notes if note == "check" or isinstance(note, int)] == [
        "check",
        *(4, "check"),
        *(0, "check"),
        *(2, "check"),
        -1,
    ]
    assert failures(encoded) == [(1, ErrorCode.ENCODE_ERROR), (3, ErrorCode.ENCODE_ERROR)]
    np.testing.assert_array_equal(encoded.vectors[[0, 2, 4]], plainly(chunk_of("a", "c", "e")).vectors)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt": "query: "},
        {"normalize": False},
        {"long": "error"},
        {"long": "mean"},
        {"long": "mean", "dimensions": 3},
        {"dimensions": 2, "normalize": False},
    ],
    ids=str,
)
def test_what_comes_out_is_what_the_encoder_makes_of_the_whole_chunk(options: dict[str, Any]) -> None:
    texts = [" ".join([f"w{row}"] * (1 + row * 5 % 11)) for row in range(20)]
    texts[4] = texts[9] = "the same text twice"
    chunk = chunk_of(*texts)
    careful, plain = carefully(chunk, **options), plainly(chunk, **options)
    np.testing.assert_array_equal(careful.vectors, plain.vectors)
    assert careful.vectors.dtype == np.float32
    assert careful.errors == plain.errors
    assert careful.truncations == plain.truncations
    assert careful.tokens >= plain.tokens  # a text that stands twice is encoded twice
    assert facts(careful) or options.get("long") in ("error", "mean")


def test_errors_and_truncations_stand_at_their_rows_in_the_order_of_the_records() -> None:
    long = "a b c d e f g h i j"
    chunk = chunk_of(
        "fine", "", "fail-encoder", long, "fail-tokenizer", b"int", "out-of-memory", "not-a-number", "lost", long,
        kinds={5: RecordKind.NOT_TEXT},
    )  # fmt: skip
    encoded = carefully(chunk, given_up=[8])
    assert failures(encoded) == [
        (1, ErrorCode.EMPTY),
        (2, ErrorCode.ENCODE_ERROR),
        (4, ErrorCode.ENCODE_ERROR),
        (5, ErrorCode.NOT_TEXT),
        (6, ErrorCode.OUT_OF_MEMORY),
        (7, ErrorCode.NON_FINITE),
        (8, ErrorCode.CRASHED_WORKER),
    ]
    assert facts(encoded) == [(3, 8, 2), (9, 8, 2)]
    assert np.isnan(encoded.vectors).all(axis=1).tolist() == [row not in (0, 3, 9) for row in range(10)]


@pytest.mark.parametrize("last", [0, 2, -1])
def test_whoever_is_told_may_end_it(last: int) -> None:
    notes: list[object] = []

    class Ending(NotingUse):
        def announce(self, row: int) -> None:
            if row == last:
                raise KeyboardInterrupt
            super().announce(row)

    with pytest.raises(KeyboardInterrupt):
        encode_carefully(ChunkEncoder(Noting(notes), 32), chunk_of("a", "b", "c"), {}, Ending(notes))
    assert [note for note in notes if isinstance(note, int)] == list(range(3 if last == -1 else last))
    assert sum(str(note).startswith("encode") for note in notes) == (3 if last == -1 else last)
