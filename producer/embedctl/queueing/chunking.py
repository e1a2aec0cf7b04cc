"""Cuts records into chunks, bounded by rows and by bytes. The same records and bounds always make the same chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from embedctl.corpus.records import Record
from embedctl_config.wire import ChunkInput


def chunks_of(records: Iterable[Record], *, max_rows: int, max_bytes: int) -> Iterator[ChunkInput]:
    """Cut records into chunks of consecutive records. The bytes of a record are those of its text and its kept fields.
    A record longer than `max_bytes` becomes a chunk with this record alone."""
    first = 0
    for group in groups_of(records, max_rows=max_rows, max_bytes=max_bytes):
        yield _chunk(first, group)
        first += len(group)


def groups_of(records: Iterable[Record], *, max_rows: int, max_bytes: int) -> Iterator[list[Record]]:
    """The records of each chunk of :func:`chunks_of`."""
    held: list[Record] = []
    size = 0
    for record in records:
        added = size_of(record)
        if held and (len(held) == max_rows or size + added > max_bytes):
            yield held
            held, size = [], 0
        held.append(record)
        size += added
    if held:
        yield held


def size_of(record: Record) -> int:
    """The bytes of a record's text and its kept fields."""
    return len(record.text) + len(record.kept or b"")


def _chunk(first: int, records: list[Record]) -> ChunkInput:
    ids = [record.id for record in records]
    return ChunkInput(
        first=first,
        kinds=bytes(record.kind for record in records),
        texts=[record.text for record in records],
        ids=None if all(label is None for label in ids) else ids,
        kept=None if records[0].kept is None else [record.kept or b"{}" for record in records],
    )
