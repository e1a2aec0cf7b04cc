"""The types that vectors are written in, and how they come about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from embedctl.waiting.results import ChunkVectors, FailedRecord, Vectors
from embedctl_config.errors import OutputError, SettingsError
from embedctl_config.wire import ErrorCode

#: The ranges of int8 are those of this many records, the first ones.
CALIBRATED_ON = 100_000


class Dtype(StrEnum):
    """A type of the numbers in a file. `binary` is what sentence-transformers and Cohere call `ubinary`."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    BINARY = "binary"


@dataclass(frozen=True, eq=False, slots=True)
class Numbers:
    """How vectors become numbers of a file. For int8, `ranges` are the lowest and the highest value of each component:
    float32, 2 × dimensions.

    `int8` cuts the range of each component into 256 equal parts, as `quantize_embeddings` of sentence-transformers does
    for the same ranges: `floor((value - low) / step) - 128`, at most 127, with `step = (high - low) / 255`. A value is
    restored as `low + (number + 128.5) * step`. `binary` packs the bits `value > 0`, eight to a byte, the first one
    highest.
    """

    kind: Dtype = Dtype.FLOAT32
    ranges: Vectors | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("uint8" if self.kind is Dtype.BINARY else self.kind.value)

    @property
    def has_nan(self) -> bool:
        """Whether a row can say by itself that it is no vector."""
        return self.kind in (Dtype.FLOAT32, Dtype.FLOAT16)

    def width(self, dim: int) -> int:
        """How many numbers a vector of so many dimensions has."""
        return (dim + 7) // 8 if self.kind is Dtype.BINARY else dim

    def of(self, vectors: Vectors) -> npt.NDArray[Any]:
        """The numbers of these vectors; OutputError if the ranges are of other dimensions. The row of a failed record
        is NaN, or 0 where there is no NaN."""
        if self.has_nan:
            return vectors.astype(self.dtype, copy=False)
        there = ~np.isnan(vectors).any(axis=1)
        numbers = np.zeros((len(vectors), self.width(vectors.shape[1])), self.dtype)
        good = vectors[there]
        numbers[there] = np.packbits(good > 0, axis=-1) if self.kind is Dtype.BINARY else self._as_int8(good)
        return numbers

    def fitting(self, chunk: ChunkVectors) -> tuple[ChunkVectors, list[FailedRecord]]:
        """A chunk in which the records whose vectors overflow these numbers have failed, and these records."""
        if self.kind is not Dtype.FLOAT16:
            return chunk, []
        overflows = not_finite(chunk, self.dtype) & ~np.isin(chunk.positions, [each.position for each in chunk.errors])
        if not overflows.any():
            return chunk, []
        vectors = chunk.vectors.copy()
        vectors[overflows] = np.nan
        code, why = ErrorCode.NON_FINITE, f"the vector overflows {self.kind}"
        rows = np.flatnonzero(overflows).tolist()
        refused = [FailedRecord(int(chunk.positions[row]), chunk.ids[row], code, why) for row in rows]
        errors = sorted([*chunk.errors, *refused], key=lambda each: each.position)
        sparse = None if chunk.sparse is None else chunk.sparse.without(overflows)
        multi = None if chunk.multi is None else chunk.multi.without(overflows)
        return replace(chunk, vectors=vectors, errors=errors, sparse=sparse, multi=multi), refused

    def restored(self, numbers: npt.NDArray[Any], dim: int) -> Vectors:
        """Vectors of `dim` dimensions near those that :meth:`of` made these numbers of; of them, it makes the same
        numbers again. Those of float16 are exact, and those of binary 1 or -1. Failed records have no numbers here."""
        if self.kind is Dtype.BINARY:
            bits = np.unpackbits(numbers, axis=-1, count=dim)
            return np.where(bits, np.float32(1), np.float32(-1))
        if self.kind is not Dtype.INT8:
            return numbers.astype(np.float32, copy=False)
        assert self.ranges is not None
        low, high = self.ranges
        vectors: Vectors = low + (numbers + np.float32(128.5)) * ((high - low) / 255)
        return vectors

    def facts(self, dim: int) -> dict[str, Any]:
        """What a reader needs to restore vectors, as JSON values; empty for float32."""
        if self.kind is Dtype.FLOAT32:
            return {}
        ranges = {} if self.ranges is None else {"ranges": self.ranges.tolist()}
        return {"dtype": self.kind.value, "dimensions": dim, **ranges}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        ranges = facts.get("ranges")
        kind = Dtype(facts.get("dtype", Dtype.FLOAT32))
        return cls(kind, None if ranges is None else np.array(ranges, np.float32))

    def _as_int8(self, vectors: Vectors) -> npt.NDArray[np.int8]:
        assert self.ranges is not None
        if self.ranges.shape[1] != vectors.shape[1]:
            raise OutputError(
                f"the ranges are of vectors with {self.ranges.shape[1]} dimensions, and these have {vectors.shape[1]}: "
                "give the ranges of this model's vectors, or leave --ranges out"
            )
        low, high = self.ranges
        step = (high - low) / 255
        step = np.where(step == 0, 1, step)
        parts: npt.NDArray[np.float32] = np.clip(np.floor((vectors - low) / step), 0, 255)
        return (parts - 128).astype(np.int8)


FLOAT32 = Numbers()


def not_finite(chunk: ChunkVectors, dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """The rows of a chunk with a dense vector or a multi-vector that is not finite in this type (float32 or float16),
    or with such a weight, as float32; a failed record's dense vector is NaN."""
    rows = ~_finite(chunk.vectors, dtype)
    if (sparse := chunk.sparse) is not None:
        rows[sparse.row_of_each[~_finite(sparse.weights[:, None], sparse.weights.dtype)]] = True
    if (multi := chunk.multi) is not None:
        rows[multi.row_of_each[~_finite(multi.vectors, dtype)]] = True
    return rows


def _finite(vectors: Vectors, dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    numbers, most = vectors.ravel(), float(np.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        if float(np.dot(numbers, numbers)) < most**2:  # the sum of all squares is soon made
            return np.ones(len(vectors), np.bool_)
        return np.asarray(np.isfinite(vectors.astype(dtype, copy=False)).all(axis=1))


def load_ranges(path: Path) -> Vectors:
    """The ranges in a `.npy` file, as `fetch` writes them beside an int8 array: float32, 2 × dimensions. SettingsError
    for any other file."""
    try:
        ranges = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} is no .npy file that can be read: {error}") from error
    return _checked_ranges(ranges, str(path))


def numbers_of(dtype: str | None, ranges: npt.ArrayLike | None = None) -> Numbers | None:
    """How vectors are to be stored, as the library's callers say it; None if they do not. SettingsError: there is no
    such type, the ranges are none, or the type has none."""
    try:
        kind = Dtype.FLOAT32 if dtype is None else Dtype(dtype)
    except ValueError:
        raise SettingsError(f"dtype is {dtype!r}: {', '.join(Dtype)}") from None
    if ranges is None:
        return None if dtype is None else Numbers(kind)
    if kind is not Dtype.INT8:
        raise SettingsError(f"ranges are for the dtype int8, and not for {kind}")
    return Numbers(kind, _checked_ranges(np.asarray(ranges), "ranges"))


def agreed(wanted: Numbers | None, stored: Numbers, job_id: str, *, restores: bool) -> Numbers:
    """How vectors of a job are written if parts store some of them so already: like these, unless float32 is wanted,
    and the vectors may be restored. SettingsError: something else is wanted."""
    if wanted is None:
        return stored
    if restores and wanted.kind is Dtype.FLOAT32:
        if stored.kind is Dtype.BINARY:
            raise SettingsError(f"job {job_id} was drained as binary, and float32 can't be restored from that")
        return wanted
    if wanted.kind is not stored.kind:
        more = ", or choose float32 to have the vectors restored" if restores else ""
        raise SettingsError(f"job {job_id} was drained as {stored.kind}: omit the dtype {wanted.kind}{more}")
    if wanted.ranges is not None and not np.array_equal(wanted.ranges, [] if stored.ranges is None else stored.ranges):
        raise SettingsError(f"job {job_id} was drained with other ranges: omit the ranges")
    return stored


def ranges_of(chunks: Iterable[ChunkVectors], where: str) -> tuple[Vectors, int]:
    """The lowest and the highest value of each component in the first chunks, of at least CALIBRATED_ON records, and
    how many vectors these are. OutputError: fewer than two."""
    seen, records = 0, 0
    bounds: Vectors | None = None
    for chunk in chunks:
        good = chunk.vectors[~np.isnan(chunk.vectors).any(axis=1)]
        if len(good):
            known = good if bounds is None else np.concatenate([bounds, good])
            bounds = np.stack([known.min(axis=0), known.max(axis=0)])
        seen, records = seen + len(good), records + len(chunk.positions)
        if records >= CALIBRATED_ON:
            break
    if bounds is None or seen < 2:
        raise OutputError(
            f"{where}: int8 needs the range of each component, and {seen} record has a vector: give a file with "
            "--ranges, or choose another --dtype"
        )
    return bounds, seen


def _checked_ranges(ranges: object, where: str) -> Vectors:
    if not isinstance(ranges, np.ndarray) or ranges.ndim != 2 or len(ranges) != 2 or ranges.dtype.kind != "f":
        raise SettingsError(
            f"{where} holds no ranges: give a float array of two rows, the lowest and the highest value"
        )
    if not np.isfinite(ranges).all() or (ranges[0] > ranges[1]).any():
        raise SettingsError(f"{where} holds no ranges: each lowest value must be finite and not above the highest one")
    return ranges.astype(np.float32)
