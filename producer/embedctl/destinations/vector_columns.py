"""The columns of a parquet file that hold vectors: `embedding`, `sparse` and `multi`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embedctl.destinations.numbers import Dtype, Numbers
from embedctl.waiting.results import ChunkVectors, Vectors
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.outputs import Output

EMBEDDING = "embedding"
#: The path of the numbers of each column in a file's schema.
_NUMBERS = {
    EMBEDDING: "embedding.list.element",
    str(Output.SPARSE): "sparse.list.element.value",
    str(Output.MULTI): "multi.list.element.list.element",
}
#: The metadata of a column of sparse or multi-vectors that tell their width: a kept field has none.
_WIDTH = b"width"


def vector_columns(chunk: ChunkVectors, numbers: Numbers, failed: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """The columns by name: `embedding`, unless the job asks for other vectors alone, and those of the others. The cell
    of a failed record is null. Multi-vectors are float16 if dense ones are to be."""
    columns, null = {}, pa.array(failed)
    if chunk.vectors.shape[1] or (chunk.sparse is None and chunk.multi is None):
        dense = numbers.of(chunk.vectors)
        flat, width = pa.array(np.ascontiguousarray(dense).reshape(-1)), dense.shape[1]
        columns[EMBEDDING] = (
            pa.FixedSizeListArray.from_arrays(flat, width, mask=null)
            if width
            else pa.nulls(len(dense), pa.list_(flat.type, 0))  # a file without records
        )
    if (sparse := chunk.sparse) is not None:
        pairs = pa.StructArray.from_arrays([pa.array(sparse.indices), pa.array(sparse.weights)], ["index", "value"])
        columns[Output.SPARSE] = pa.ListArray.from_arrays(_offsets(sparse), pairs, mask=null)
    if (multi := chunk.multi) is not None:
        kind = np.float16 if numbers.kind is Dtype.FLOAT16 else np.float32
        flat = pa.array(multi.vectors.astype(kind, copy=False).reshape(-1))
        tokens = pa.FixedSizeListArray.from_arrays(flat, multi.width)
        columns[Output.MULTI] = pa.ListArray.from_arrays(_offsets(multi), tokens, mask=null)
    return columns


def fields_of(columns: dict[str, Any], chunk: ChunkVectors) -> list[Any]:
    """The fields of these columns in a schema."""
    widths = {Output.SPARSE: chunk.sparse, Output.MULTI: chunk.multi}
    told = {str(name): {_WIDTH: str(rows.width)} for name, rows in widths.items() if rows is not None}
    return [pa.field(name, column.type, metadata=told.get(name)) for name, column in columns.items()]


def other_vectors(schema: Any) -> dict[str, int]:
    """The columns of sparse and multi-vectors, and their widths."""
    found = {name: (schema.field(name).metadata or {}).get(_WIDTH) for name in _NUMBERS if name in schema.names}
    return {name: int(width) for name, width in found.items() if width is not None}


def encodings(names: list[str], numbers: Numbers) -> tuple[list[str], dict[str, str]]:
    """The numbers that a dictionary encodes, and the encoding of the others, by their paths.

    The bytes of the same place of all numbers stand together: the signs and exponents then compress. Of int8, which
    parquet stores in four bytes, only a dictionary stores one.
    """
    coarse = [_NUMBERS[EMBEDDING]] if EMBEDDING in names and numbers.kind is Dtype.INT8 else []
    paths = (_NUMBERS[name] for name in names)
    return coarse, {path: "BYTE_STREAM_SPLIT" for path in paths if path not in coarse}


def dense_in(table: Any, numbers: Numbers, dim: int | None) -> Vectors:
    """The dense vectors of a table's rows, of `dim` dimensions, or as many as are stored, restored; a failed record's
    row is NaN, because its slot holds anything. Of 0 dimensions if there are none."""
    if EMBEDDING not in table.column_names:
        return np.empty((len(table), 0), np.float32)
    embedding = table.column(EMBEDDING).combine_chunks()
    dim = embedding.type.list_size if dim is None else dim
    vectors = np.full((len(table), dim), np.nan, np.float32)
    valid = embedding.is_valid().to_numpy(zero_copy_only=False)
    stored = embedding.flatten().to_numpy(zero_copy_only=False).reshape(-1, embedding.type.list_size)
    vectors[valid] = numbers.restored(stored, dim)
    return vectors


def sparse_in(table: Any) -> SparseVectors | None:
    """The sparse vectors of a table's rows; None if it has no such column."""
    width = other_vectors(table.schema).get(Output.SPARSE)
    if width is None:
        return None
    column = table.column(Output.SPARSE).combine_chunks()
    pairs = column.flatten()
    return SparseVectors(width, _counts(column), pairs.field(0).to_numpy(), pairs.field(1).to_numpy())


def multi_in(table: Any) -> MultiVectors | None:
    """As :func:`sparse_in`, of multi-vectors."""
    width = other_vectors(table.schema).get(Output.MULTI)
    if width is None:
        return None
    column = table.column(Output.MULTI).combine_chunks()
    tokens = column.flatten()
    vectors = tokens.flatten().to_numpy(zero_copy_only=False).reshape(-1, width).astype(np.float32, copy=False)
    return MultiVectors(width, _counts(column), vectors)


def _offsets(rows: SparseVectors | MultiVectors) -> Any:
    return pa.array(rows.starts.astype(np.int32))


def _counts(column: Any) -> npt.NDArray[np.int64]:
    counts: npt.NDArray[np.int64] = column.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    return counts
