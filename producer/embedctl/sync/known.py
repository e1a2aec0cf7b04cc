"""Vectors that are known by their texts, so that these need not be encoded: those of an earlier output, or a cache."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import Digests
from embedctl.corpus.runs import NAME, Runs, explained, parts_of, starts_of
from embedctl.destinations.interface import Contract
from embedctl.destinations.numbers import FLOAT32, Dtype, Numbers
from embedctl.waiting.results import Vectors
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import OutputError, SettingsError
from embedctl_config.outputs import Output

#: Digests in memory; more of them go to the disk.
_HELD = 2**17
_COST = "finding texts in an earlier output takes up to 48 bytes for each of its rows"
#: The bytes of a digest that find its row; all of them are compared when the row is taken.
_FINDING = 16


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Vectors of texts, a row for each.

    Attributes:
        digests: of the texts.
        cuts: uint32, rows × 2, how many tokens of each text were used and lost: zeros unless it was cut.
        vectors, sparse, multi: as in :class:`ChunkVectors`.
    """

    digests: Digests
    cuts: npt.NDArray[np.uint32]
    vectors: Vectors
    sparse: SparseVectors | None = None
    multi: MultiVectors | None = None

    @property
    def widths(self) -> dict[Output, int]:
        """The size of the vectors of each kind that there is."""
        sizes = {Output.DENSE: self.vectors.shape[1]}
        others = {Output.SPARSE: self.sparse, Output.MULTI: self.multi}
        sizes |= {output: rows.width for output, rows in others.items() if rows is not None}
        return {output: size for output, size in sizes.items() if size}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        others = [each for each in (self.sparse, self.multi) if each is not None]
        rest = sum(each.nbytes + each.counts.nbytes for each in others)
        return self.digests.nbytes + self.cuts.nbytes + self.vectors.nbytes + rest

    def with_arrays(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Rows:
        """The same rows with each array replaced by what `change` makes of it."""
        return Rows(
            change(self.digests),
            change(self.cuts),
            change(self.vectors),
            None if self.sparse is None else self.sparse.with_arrays(change),
            None if self.multi is None else self.multi.with_arrays(change),
        )

    def select(self, rows: npt.NDArray[np.int64]) -> Rows:
        """These rows, in this order."""
        return Rows(
            self.digests[rows],
            self.cuts[rows],
            self.vectors[rows],
            None if self.sparse is None else self.sparse.select(rows),
            None if self.multi is None else self.multi.select(rows),
        )

    @classmethod
    def joined(cls, parts: Sequence[tuple[Rows, Sequence[int]]]) -> Self:
        """The rows of at least one part, in the order of the places that are given with each part. All parts have
        vectors of the same kinds and sizes."""
        rows = [part for part, _ in parts]
        order = np.argsort(np.concatenate([places for _, places in parts]))
        sparse = [part.sparse for part in rows if part.sparse is not None]
        multi = [part.multi for part in rows if part.multi is not None]
        return cls(
            np.concatenate([part.digests for part in rows])[order],
            np.concatenate([part.cuts for part in rows])[order],
            np.concatenate([part.vectors for part in rows])[order],
            SparseVectors.joined(sparse).select(order) if sparse else None,
            MultiVectors.joined(multi).select(order) if multi else None,
        )


class Known(ABC):
    """Vectors by the digests of their texts, under a name for messages. Every method raises OutputError if they can't
    be read. `widths` are the sizes of their vectors, as :attr:`Rows.widths`; empty while none was found."""

    name: str
    widths: Mapping[Output, int]

    @abstractmethod
    def has(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Whether there is a vector for each digest; there is none for a record without a text."""

    @abstractmethod
    def take(self, digests: Digests) -> Rows:
        """The vectors of digests that it has."""


class Earlier(Known):
    """The rows of an earlier output, which stays the same while it is open, even if its name is given to another file.
    Its vectors are what `about` says."""

    about: Contract
    rows: int
    _index: Index | None = None

    def has(self, digests: Digests) -> npt.NDArray[np.bool_]:
        return self._places(digests) >= 0

    def take(self, digests: Digests) -> Rows:
        return self.rows_at(self._places(digests))

    @abstractmethod
    def digests(self) -> Iterator[Digests]:
        """Those of all rows in their order, some thousand at a time; zeros for a row without a vector."""

    @abstractmethod
    def rows_at(self, places: npt.NDArray[np.int64]) -> Rows:
        """Some of the rows."""

    def _places(self, digests: Digests) -> npt.NDArray[np.int64]:
        if self._index is None:
            self._index = Index(self.digests())
        return self._index.find(digests)


class Index:
    """Finds the first row of each digest, among more of them than fit into memory; zeros are not found. InputError:
    there is no room for temporary files."""

    def __init__(self, digests: Iterable[Digests]) -> None:
        with Runs(NAME, _HELD, _COST) as runs:
            count = 0
            for some in digests:
                entries = np.empty(len(some), NAME)
                entries["d0"], entries["d1"] = _halves(some)
                entries["at"] = np.arange(count, count + len(some), dtype=np.uint64)
                runs.add(entries[some.any(axis=1)])
                count += len(some)
            with explained(_COST):
                self._columns = [scratch(count, np.dtype("<u8")) for _ in range(3)]
            end = 0
            for (part,) in parts_of(runs):  # which come in the order of their digests
                entries = part[np.lexsort((part["at"], part["d1"], part["d0"]))]
                entries = entries[starts_of(entries, ("d0", "d1"))]
                for column, name in zip(self._columns, NAME.names or (), strict=True):
                    column[end : end + len(entries)] = entries[name]
                end += len(entries)
        self._columns = [column[:end] for column in self._columns]

    def find(self, digests: Digests) -> npt.NDArray[np.int64]:
        """The row of each digest; -1 where there is none."""
        first, second, rows = self._columns
        if not len(first):
            return np.full(len(digests), -1, np.int64)
        d0, d1 = _halves(digests)
        # Where two digests have the same first half, only one is found. The text of the other is encoded.
        at = np.minimum(np.searchsorted(first, d0), len(first) - 1)
        there = (first[at] == d0) & (second[at] == d1)
        return np.where(there, rows[at].astype(np.int64), -1)


def scratch(count: int, dtype: np.dtype[Any], folder: Path | None = None) -> npt.NDArray[Any]:
    """An array in a temporary file without a name, which is gone however the process ends. It is in a folder that has
    room for it, or in that of temporary files."""
    if not count:  # an empty file can't be mapped
        return np.empty(0, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        # Writing to a mapped page on a full disk would kill the process.
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        return np.memmap(file, dtype, "r+", shape=(count,))


def no_digests(name: str) -> OutputError:
    """The error for an output that does not say which texts it is of."""
    return OutputError(
        f"{name} has no digests of its texts, so nothing tells what has changed: remove it to encode everything"
    )


def check_numbers(name: str, stored: Numbers, numbers: Numbers | None) -> None:
    """Raise SettingsError unless vectors can be copied as they are."""
    wanted = FLOAT32 if numbers is None else numbers
    if stored.kind is wanted.kind and stored.kind in (Dtype.FLOAT32, Dtype.FLOAT16):
        return
    raise SettingsError(
        f"{name} stores {stored.kind}, and the new output is to store {wanted.kind}: vectors are copied exactly from "
        "float32 to float32, and from float16 to float16. Give that --dtype, or remove it to encode everything"
    )


def _halves(digests: Digests) -> npt.NDArray[np.uint64]:
    """The first bytes of digests, as two rows of numbers."""
    return np.ascontiguousarray(digests[:, :_FINDING]).view("<u8").T
