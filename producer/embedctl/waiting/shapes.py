"""Sparse and multi-vectors in memory: rows of different lengths, one after the other in flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from embedctl_config import outputs


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of different lengths. `width` is that of all; `counts`, int64, are the lengths, 0 for a failed record."""

    _FLAT: ClassVar[tuple[str, ...]] = ()

    width: int
    counts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Where each row begins and ends in the flat arrays."""
        return pairwise(self.starts.tolist())

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each row begins in the flat arrays, and where the last one ends: int64, rows + 1."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def row_of_each(self) -> npt.NDArray[np.int64]:
        """The row that each entry of the flat arrays belongs to."""
        return np.repeat(np.arange(len(self)), self.counts)

    def select(self, rows: slice | npt.NDArray[np.int64]) -> Self:
        """These rows, in this order."""
        starts, counts = self.starts[:-1][rows], self.counts[rows]
        ends = np.cumsum(counts)
        flat = np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())
        return replace(self, counts=counts, **{name: getattr(self, name)[flat] for name in self._FLAT})

    def without(self, rows: npt.NDArray[np.bool_]) -> Self:
        """The same with nothing in some rows."""
        flat = ~rows[self.row_of_each]
        rest = {name: getattr(self, name)[flat] for name in self._FLAT}
        return replace(self, counts=np.where(rows, 0, self.counts), **rest)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, of which there is at least one."""
        flat: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in cls._FLAT}
        return cls(parts[0].width, np.concatenate([part.counts for part in parts]), **flat)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self._FLAT)

    def with_arrays(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Self:
        """The same rows with each array replaced by what `change` makes of it."""
        flat: dict[str, Any] = {name: change(getattr(self, name)) for name in self._FLAT}
        return replace(self, counts=change(self.counts), **flat)

    def with_rows(self, rows: npt.NDArray[np.int64], later: Self | None) -> Self:
        """The same with the rows at these places, ascending, replaced by later ones."""
        if later is None:
            return self
        order = np.arange(len(self))
        order[rows] = len(self) + np.arange(len(rows))
        return self.joined([self, later]).select(order)


@dataclass(frozen=True, slots=True, eq=False)
class SparseVectors(_Rows):
    """Sparse vectors. `width` is the size of the vocabulary; `indices` (uint32, ascending in each row) and `weights`
    (float32) are those of all rows."""

    _FLAT: ClassVar[tuple[str, ...]] = ("indices", "weights")

    indices: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.float32]

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]]:
        """The indices and the weights of each row."""
        return ((self.indices[first:end], self.weights[first:end]) for first, end in self.bounds)

    @classmethod
    def of(cls, wire: outputs.Sparse) -> Self:
        """Those of a result."""
        indices, weights = np.frombuffer(wire.indices, "<u4"), np.frombuffer(wire.weights, "<f4")
        return cls(wire.width, np.asarray(wire.counts, np.int64), indices, weights)


@dataclass(frozen=True, slots=True, eq=False)
class MultiVectors(_Rows):
    """Multi-vectors: all vectors of all rows × `width`; float32, but in the type of a table in a batch for one."""

    _FLAT: ClassVar[tuple[str, ...]] = ("vectors",)

    vectors: npt.NDArray[np.float32]

    def astype(self, dtype: np.dtype[Any]) -> Self:
        return replace(self, vectors=self.vectors.astype(dtype, copy=False))

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        """The vectors of each row."""
        return (self.vectors[first:end] for first, end in self.bounds)

    @classmethod
    def of(cls, wire: outputs.Multi) -> Self:
        """Those of a result."""
        vectors = np.frombuffer(wire.vectors, wire.dtype).reshape(-1, wire.width).astype("<f4", copy=False)
        return cls(wire.width, np.asarray(wire.counts, np.int64), vectors)
