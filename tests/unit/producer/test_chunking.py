"""Chunks: all records, in order, within both bounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from embedctl.corpus.records import Record
from embedctl.queueing.chunk_sizes import chunks_of
from embedctl_config.wire import ChunkInput, RecordKind


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
