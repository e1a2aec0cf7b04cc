"""Ids as columns of arrow."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from embedctl_config.errors import MissingExtra
from embedctl_config.record_ids import MAX_DIGITS, IdType, Kind, RecordId

try:
    import pyarrow as pa
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error


def arrow_type(ids: IdType) -> pa.DataType:
    return {
        Kind.TEXT: pa.string(),
        Kind.WHOLE: pa.int64(),
        Kind.UUID: pa.uuid(),
        Kind.DECIMAL: pa.decimal128(MAX_DIGITS, ids.scale),
        Kind.BYTES: pa.binary(),
        Kind.DATE: pa.date32(),
    }[ids.kind]


def column_of(ids: Sequence[RecordId | None], kind: pa.DataType) -> pa.Array:
    if kind != pa.uuid():
        return pa.array(ids, kind)
    return pa.array([label.bytes if isinstance(label, UUID) else label for label in ids], kind)
