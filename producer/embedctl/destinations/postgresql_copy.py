"""A batch as PostgreSQL's binary `COPY` takes it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from itertools import chain, repeat
from uuid import UUID

import numpy as np

from embedctl.destinations.interface import Batch, Stored
from embedctl.waiting.shapes import SparseVectors
from embedctl_config.errors import MissingExtra
from embedctl_config.record_ids import RecordId

try:
    from psycopg.types.datetime import DateBinaryDumper
    from psycopg.types.numeric import DecimalBinaryDumper
except ImportError as error:
    raise MissingExtra("pgvector", "postgresql://") from error

#: Rows that are sent together; the size of a value that is null; the first byte of a jsonb.
_BLOCK, _NULL, _JSONB = 500, b"\xff\xff\xff\xff", b"\x01"


def encoded(batch: Batch, columns: Sequence[str], bits: int) -> Iterator[bytes]:
    """Rows in PostgreSQL's binary format, in which each value follows its size. psycopg makes them half as fast.
    Vectors of `binary` have so many bits."""
    yield b"PGCOPY\n\xff\r\n\0" + bytes(8)
    begin = repeat(len(columns).to_bytes(2, "big"))
    for at in range(0, len(batch), _BLOCK):
        part = batch.part(slice(at, at + _BLOCK))
        values = [_values(part, column, bits) for column in columns]
        yield b"".join(chain.from_iterable(zip(begin, *values, strict=False)))
    yield b"\xff\xff"


def child_rows(batch: Batch) -> Batch:
    """A row for each vector of a batch's multi-vectors: the id of its record, its position in the text, and itself."""
    if (multi := batch.multi) is None:
        return batch.part(slice(0))
    ids = chain.from_iterable(map(repeat, batch.ids, multi.counts.tolist()))
    positions = np.arange(len(multi.vectors)) - np.repeat(multi.starts[:-1], multi.counts)
    return Batch(list(ids), multi.vectors, positions=positions)


def _values(batch: Batch, column: str, bits: int) -> Iterator[bytes]:
    """A value for each row, after its size."""
    if column == "embedding":
        yield from _dense(batch.vectors, bits)
    elif column == "sparse" and batch.sparse is not None:
        yield from _sparse(batch.sparse)
    elif column == "position" and batch.positions is not None:
        yield from (_sized(struct.pack(">i", each)) for each in batch.positions.tolist())
    elif column == "id":
        yield from (_sized(_binary(label)) for label in batch.ids)
    elif column == "source" and batch.sources is not None:
        yield from map(_sized, batch.sources)
    elif column == "metadata" and batch.kept is not None:
        yield from (_sized(_JSONB + fields.encode()) for fields in batch.kept)
    else:
        yield from repeat(_NULL, len(batch))


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def _dense(vectors: Stored, bits: int) -> Iterator[bytes]:
    """pgvector's: the dimensions, two bytes for later use, and the components; or PostgreSQL's: the number of bits, and
    these."""
    is_binary, width = vectors.dtype == np.uint8, vectors.shape[1]
    head = [("dim", ">i4")] if is_binary else [("dim", ">i2"), ("unused", ">i2")]
    kind = np.dtype([("size", ">i4"), *head, ("vector", vectors.dtype.newbyteorder(">"), (width,))])
    rows = np.zeros(len(vectors), kind)
    rows["size"], rows["dim"], rows["vector"] = kind.itemsize - 4, bits if is_binary else width, vectors
    data = rows.tobytes()
    return (data[at : at + kind.itemsize] for at in range(0, len(data), kind.itemsize))


def _sparse(rows: SparseVectors) -> Iterator[bytes]:
    """pgvector's: the dimensions, how many of them have a value, four bytes for later use, their indices, which count
    from 0 here and from 1 in a text, and the values."""
    indices, values = rows.indices.astype(">i4").tobytes(), rows.weights.astype(">f4").tobytes()
    for count, first in zip(rows.counts.tolist(), rows.starts[:-1].tolist(), strict=True):
        at = slice(4 * first, 4 * (first + count))
        yield struct.pack(">4i", 12 + 8 * count, rows.width, count, 0) + indices[at] + values[at]


def _binary(label: RecordId) -> bytes:
    if isinstance(label, str):
        return label.encode()
    if isinstance(label, int):
        return label.to_bytes(8, "big", signed=True)
    if isinstance(label, bytes):
        return label
    if isinstance(label, UUID):
        return label.bytes
    if isinstance(label, Decimal):
        return bytes(DecimalBinaryDumper(Decimal).dump(label) or b"")
    return bytes(DateBinaryDumper(date).dump(label) or b"")
