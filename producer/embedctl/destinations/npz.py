"""`.npz`: dense vectors as an array, sparse ones as the matrix that `scipy.sparse.load_npz` reads, and files beside."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import numpy as np

from embedctl.destinations.npy import NpyWriter
from embedctl.destinations.unfinished import LineFile, part_of
from embedctl.destinations.writer import Content
from embedctl.waiting.results import ChunkVectors

#: The arrays that grow with the records, and their types: the dense vectors; and of the matrix the weights, the word of
#: each, and where each row ends.
_GROWING = {"dense": "<f4", "data": "<f4", "indices": "<i4", "indptr": "<i8"}


class NpzWriter(NpyWriter):
    """Writes dense vectors as `dense`, float32, records × dimensions, and sparse ones as `scipy.sparse.save_npz` does:
    `data` float32, `indices` int32, `indptr` int64, `shape` (records, size of the vocabulary) and `format`. Nothing is
    compressed. The row of a record that failed, or that was not encoded, is NaN in `dense` and empty in the matrix, and
    `errors` names it.

    The arrays grow in files of their own beside it, and become one file at the end.
    """

    def __init__(self, content: Content) -> None:
        super().__init__(replace(content, about=None))
        self._rows_tell = False
        self._arrays = {name: LineFile(content.path.with_name(f"{content.path.name}.{name}"), b"") for name in _GROWING}
        self.paths += [each.path for each in self._arrays.values()]
        self._arrays["indptr"].write([bytes(8)])
        self._stored = self._ends = self._width = self._dim = 0

    def close(self) -> None:
        super().close()
        for each in self._arrays.values():
            each.close()

    def keep(self, job_id: str) -> Path | None:
        self._complete()
        return super().keep(job_id)

    def _put(self, chunk: ChunkVectors) -> None:
        if not len(chunk.positions):
            return  # of a stopped job
        rows = chunk.positions - self._ends
        count = int(rows[-1]) + 1
        if dim := chunk.vectors.shape[1]:
            dense = np.full((count, dim), np.nan, _GROWING["dense"])
            dense[rows] = chunk.vectors
            self._arrays["dense"].write([dense.tobytes()])
            self._dim = dim
        if (sparse := chunk.sparse) is not None:
            self._width = sparse.width or self._width
            self._arrays["data"].write([sparse.weights.astype(_GROWING["data"]).tobytes()])
            self._arrays["indices"].write([sparse.indices.astype(_GROWING["indices"]).tobytes()])
            counts = np.zeros(count, np.int64)
            counts[rows] = sparse.counts
            ends = self._stored + np.cumsum(counts)
            self._arrays["indptr"].write([ends.astype(_GROWING["indptr"]).tobytes()])
            self._stored = int(ends[-1])
        self._ends += count

    def _complete(self) -> None:
        lacking, row = self._rows - self._ends, np.full(self._dim, np.nan, _GROWING["dense"])
        self._arrays["dense"].write(repeat(row.tobytes(), lacking))
        self._arrays["indptr"].write(repeat(self._stored.to_bytes(8, "little"), lacking))
        shapes: dict[str, tuple[int, ...]] = {"dense": (self._rows, self._dim)} if self._dim else {}
        facts: dict[str, object] = {}
        if self._width or not shapes:
            shapes |= {"data": (self._stored,), "indices": (self._stored,), "indptr": (self._rows + 1,)}
            facts = {"shape": [self._rows, self._width], "format": b"csr"}
        whole = part_of(self._path)
        whole.unlink(missing_ok=True)  # it might be a link to another file
        with ZipFile(whole, "x") as zipped:
            for name, array in self._arrays.items():
                array.close()
                _move(part_of(array.path), zipped, name, shapes.get(name))
            for name, value in facts.items():
                with zipped.open(ZipInfo(f"{name}.npy"), "w") as member:
                    np.lib.format.write_array(member, np.array(value))


def _move(numbers: Path, zipped: ZipFile, name: str, shape: tuple[int, ...] | None) -> None:
    """Add an array of this shape, whose numbers are in a file, if it has one. The file is then gone."""
    if shape is not None:
        with zipped.open(ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member, numbers.open("rb") as stream:
            header = {"descr": _GROWING[name], "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            shutil.copyfileobj(stream, member, 1024 * 1024)
    numbers.unlink()
