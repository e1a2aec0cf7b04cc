"""A batch as PostgreSQL's binary `COPY` takes it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from uuid import UUID

import numpy as np

from embedctl.destinations.interface import Batch
from embedctl_config.errors import MissingExtra
from embedctl_config.record_ids import RecordId

try:
    from psycopg.types.datetime import DateBinaryDumper
    from psycopg.types.numeric import DecimalBinaryDumper
except ImportError as error:
    raise MissingExtra("pgvector", "postgresql://") from error

#: The columns that are ours, in their order. A table of somebody else may lack the last one.
COLUMNS = ("id", "embedding", "source", "metadata")
#: Rows that are sent together; the size of a value that is null; the first byte of a jsonb.
_BLOCK, _NULL, _JSONB = 500, b"\xff\xff\xff\xff", b"\x01"


def encoded(batch: Batch, columns: Sequence[str]) -> Iterator[bytes]:
    """Rows in PostgreSQL's binary format, in which each value follows its size. psycopg makes them half as fast."""
    dim = batch.vectors.shape[1]
    # pgvector's: the dimensions, two bytes for later use, and the components.
    kind = np.dtype(
        [("size", ">i4"), ("dim", ">i2"), ("unused", ">i2"), ("vector", batch.vectors.dtype.newbyteorder(">"), (dim,))]
    )
    begin, size_of = len(columns).to_bytes(2, "big"), struct.Struct(">i").pack
    yield b"PGCOPY\n\xff\r\n\0" + bytes(8)
    for at in range(0, len(batch), _BLOCK):
        part = batch.part(slice(at, at + _BLOCK))
        vectors = np.zeros(len(part), kind)
        vectors["size"], vectors["dim"], vectors["vector"] = kind.itemsize - 4, dim, part.vectors
        data, pieces = vectors.tobytes(), list[bytes]()
        kept: Sequence[str | None] = part.kept or [None] * len(part)
        for row, ((label, source), fields) in enumerate(zip(part.rows, kept, strict=True)):
            name = _binary(label)
            pieces += begin, size_of(len(name)), name, data[row * kind.itemsize : (row + 1) * kind.itemsize]
            pieces += (_NULL,) if source is None else (size_of(len(source)), source)
            if columns == COLUMNS:
                value = None if fields is None else _JSONB + fields.encode()
                pieces += (_NULL,) if value is None else (size_of(len(value)), value)
        yield b"".join(pieces)
    yield b"\xff\xff"


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
