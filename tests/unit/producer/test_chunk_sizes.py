"""A job's chunks are all records, in order, within both bounds: two seconds' work, and a part for each live worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl.corpus.records import Record
from embedctl.queueing import chunk_sizes
from embedctl.queueing.chunk_sizes import (
    BYTES_PER_TOKEN,
    CHUNK_S,
    ReadAhead,
    Workers,
    chunk_bytes,
    chunks_of,
    groups_of,
    size_of,
)
from embedctl_config.wire import ChunkInput, RecordKind

#: The limits of a job by the default settings.
LIMIT = 512 * 1024
OPTIONS: dict[str, Any] = {"chunk_size": 512, "chunk_bytes": LIMIT, "prompt": None, "long": "cut"}


def texts(count: int, size: int, kept: int | None = None) -> list[Record]:
    return [Record(RecordKind.TEXT, b"x" * size, None, None if kept is None else b"x" * kept)] * count


LONG = texts(96, 1900)  # about 450 tokens each


def sizes(records: Sequence[Record], workers: Workers, *, at_hand: bool = True, **options: Any) -> list[int]:
    """The records in each chunk of a job."""
    ahead = ReadAhead(records, at_hand=at_hand)
    chosen = {**OPTIONS, **options}
    limit = chunk_bytes(ahead, workers, chosen)
    assert 1 <= limit <= chosen["chunk_bytes"]
    return [len(chunk) for chunk in chunks_of(ahead, max_rows=chosen["chunk_size"], max_bytes=limit)]


def rate_of(texts: float) -> float:
    """A rate in tokens/s: a worker encodes `texts` of the long texts in the time of a chunk."""
    return texts * 1900 / BYTES_PER_TOKEN / CHUNK_S


@pytest.mark.parametrize(
    ("records", "workers", "expected"),
    [
        pytest.param(LONG, Workers(), [96], id="without live workers the settings alone decide"),
        pytest.param(LONG, Workers(count=2), [48, 48], id="a small job has a part for each of two workers"),
        pytest.param(LONG, Workers(2, prefetch=2), [24] * 4, id="no worker can take all the chunks"),
        pytest.param(LONG, Workers(1, prefetch=4), [96], id="but one that is alone"),
        # Each worker has as many chunks as another where parts of 8 KiB, or of a tenth of a second, would be odd.
        pytest.param(texts(12, 2300), Workers(2, prefetch=2), [3] * 4, id="not three parts of 8 KiB"),
        pytest.param(
            texts(12, 2300),
            Workers(2, 2300 * 12 / 3 / 0.1 / BYTES_PER_TOKEN, prefetch=2),
            [3] * 4,
            id="not three parts of a tenth of a second",
        ),
        pytest.param(LONG, Workers(2, rate_of(96 / 9.5)), [8] * 12, id="not ten, the last of 6"),
        # Records that do not fill as many chunks make more.
        pytest.param(texts(6, 20_000), Workers(2, prefetch=2), [1] * 6, id="not three of two"),
        pytest.param(texts(1030, 12), Workers(2, prefetch=2), [512, 512, 6], id="no more than rows allow"),
        pytest.param(texts(80, 200), Workers(2), [80], id="a job that is no work stays whole"),
        pytest.param(LONG, Workers(2, rate_of(20)), [16] * 6, id="2.4 chunks a worker become three even rounds"),
        pytest.param(texts(10_000, 250), Workers(8, 1e7), [512] * 19 + [272], id="chunk_size stays the maximum"),
        pytest.param([*texts(1, 50_000), *texts(250, 200)], Workers(2), [1, 250], id="a long text among short ones"),
        pytest.param(texts(1000, 0), Workers(2, 1000.0), [512, 488], id="texts of nothing are limited by rows"),
    ],
)
def test_how_many_records_a_chunk_has(records: list[Record], workers: Workers, expected: list[int]) -> None:
    assert sizes(records, workers) == expected


def test_options_bound_a_chunk_too() -> None:
    assert sizes(texts(10_000, 250), Workers(8, 1e7), chunk_size=4096) == [2097] * 4 + [1612]  # `chunk_bytes`
    assert max(sizes(LONG, Workers(2), chunk_size=7)) == 7


def test_a_chunk_is_two_seconds_of_a_measured_rate() -> None:
    assert sizes(LONG, Workers(1, rate_of(10) * 1.001), at_hand=False) == [10] * 9 + [6]


def test_kept_fields_and_truncated_text_are_no_work() -> None:
    """A chunk holds as much work as without them."""
    workers = Workers(1, 2000.0, max_tokens=256)
    many = texts(2000, 256)
    plain = sizes(many, workers)[0]
    assert plain == pytest.approx(2000.0 * CHUNK_S * BYTES_PER_TOKEN / 256, rel=0.1)
    assert sizes(texts(2000, 256, kept=1000), workers, keep=["title"])[0] == pytest.approx(plain, rel=0.1)
    long = texts(2000, 4096)
    assert sizes(long, workers)[0] == pytest.approx(2000.0 * CHUNK_S / 256, abs=1)
    assert sizes(long, workers, long="mean")[0] == pytest.approx(2000.0 * CHUNK_S * BYTES_PER_TOKEN / 4096, abs=1)


def test_the_chunks_of_a_stream_with_kept_fields_are_those_of_the_settings() -> None:
    """Nobody knows how much of its bytes will be text."""
    assert sizes(texts(100, 100, kept=900), Workers(1, 100.0), at_hand=False, keep=["title"]) == [100]


def test_no_more_is_read_ahead_than_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sizes, "_MOST_S", 60.0)  # a busy machine takes its time
    read = 0

    def records() -> Iterator[Record]:
        nonlocal read
        while True:
            read += 1
            yield texts(1, 100)[0]

    chunk_bytes(ReadAhead(records(), at_hand=True), Workers(1), OPTIONS)
    assert read == 8 * 512
    chunk_bytes(ReadAhead(records(), at_hand=True), Workers(10_000), OPTIONS)
    assert read == 8 * 512 + 16_384


@given(
    st.lists(st.builds(Record, st.just(RecordKind.TEXT), st.binary(max_size=60)), max_size=60),
    st.integers(1, 20),
    st.integers(1, 400),
    st.builds(Workers, st.integers(0, 9), st.just(0.0) | st.floats(0.1, 100.0), st.integers(0, 20)),
)
def test_records_read_ahead_keep_their_places(records: list[Record], rows: int, most: int, workers: Workers) -> None:
    options = {**OPTIONS, "chunk_size": rows, "chunk_bytes": most}
    ahead = ReadAhead(iter(records), at_hand=True)
    limit = chunk_bytes(ahead, workers, options)
    assert 1 <= limit <= most
    assert list(ahead) == records
    ends = [sum(map(size_of, records[: at + 1])) for at in range(len(records))]
    chunks = [sum(map(size_of, chunk)) for chunk in groups_of(records, max_rows=rows, max_bytes=limit)]
    assert chunk_sizes._chunks(ends, rows, limit) == chunks


def _records(kept: st.SearchStrategy[bytes | None]) -> st.SearchStrategy[list[Record]]:
    ids = st.none() | st.text("abc", min_size=1, max_size=3)
    record = st.builds(Record, st.sampled_from(RecordKind), st.binary(max_size=40), ids, kept, own=st.none())
    return st.lists(record, max_size=40)


#: All records of a job have kept fields, or none has.
RECORDS = _records(st.none()) | _records(st.binary(min_size=2, max_size=40))
ROWS = st.integers(1, 10)
BYTES = st.integers(1, 100)


def records_in(chunk: ChunkInput) -> list[Record]:
    ids = chunk.ids or [None] * len(chunk)
    kept: Sequence[bytes | None] = chunk.kept or [None] * len(chunk)
    return [
        Record(RecordKind(kind), text, label, fields)
        for kind, text, label, fields in zip(chunk.kinds, chunk.texts, ids, kept, strict=True)
    ]


def bytes_in(chunk: ChunkInput) -> int:
    return sum(map(len, [*chunk.texts, *(chunk.kept or ())]))


@given(RECORDS, ROWS, BYTES)
def test_joined_chunks_are_the_records_and_end_where_a_bound_asks(records: list[Record], rows: int, size: int) -> None:
    chunks = list(chunks_of(iter(records), max_rows=rows, max_bytes=size))
    assert list(chain.from_iterable(map(records_in, chunks))) == records
    assert [chunk.first for chunk in chunks] == [sum(map(len, chunks[:at])) for at in range(len(chunks))]
    assert all(chunk.positions is None for chunk in chunks)
    for chunk in chunks:
        assert 1 <= len(chunk) <= rows
        assert bytes_in(chunk) <= size or len(chunk) == 1
    for chunk, following in pairwise(chunks):
        assert len(chunk) == rows or bytes_in(chunk) + bytes_in(following.select([0])) > size
