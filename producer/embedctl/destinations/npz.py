"""`.npz`: sparse vectors as one matrix in compressed rows, as `scipy.sparse.load_npz` reads it, and files beside."""

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

#: The arrays of a matrix that grow with it, and their types: the weights, the word of each, and where each row ends.
_GROWING = {"data": "<f4", "indices": "<i4", "indptr": "<i8"}


class NpzWriter(NpyWriter):
    """Writes sparse vectors as `scipy.sparse.save_npz` does, uncompressed: `data` float32, `indices` int32, `indptr`
    int64, `shape` (records, size of the vocabulary) and `format`. The row of a record that failed, or that was not
    encoded, is empty, and `errors` names it.

    The arrays grow in files of their own beside it, and become one file at the end.
    """

    def __init__(self, content: Content) -> None:
        super().__init__(replace(content, about=None))
        self._rows_tell = False
        self._arrays = {name: LineFile(content.path.with_name(f"{content.path.name}.{name}"), b"") for name in _GROWING}
        self.paths += [each.path for each in self._arrays.values()]
        self._arrays["indptr"].write([bytes(8)])
        self._stored = self._ends = self._width = 0

    def close(self) -> None:
        super().close()
        for each in self._arrays.values():
            each.close()

    def keep(self, job_id: str) -> Path | None:
        self._complete()
        return super().keep(job_id)

    def _put(self, chunk: ChunkVectors) -> None:
        rows = chunk.sparse
        if rows is None or not len(chunk.positions):
            return  # of a stopped job
        self._width = rows.width or self._width
        self._arrays["data"].write([rows.weights.astype(_GROWING["data"]).tobytes()])
        self._arrays["indices"].write([rows.indices.astype(_GROWING["indices"]).tobytes()])
        counts = np.zeros(int(chunk.positions[-1]) + 1 - self._ends, np.int64)
        counts[chunk.positions - self._ends] = rows.counts
        ends = self._stored + np.cumsum(counts)
        self._arrays["indptr"].write([ends.astype(_GROWING["indptr"]).tobytes()])
        self._stored, self._ends = int(ends[-1]), self._ends + len(ends)

    def _complete(self) -> None:
        self._arrays["indptr"].write(repeat(self._stored.to_bytes(8, "little"), self._rows - self._ends))
        sizes = {"data": self._stored, "indices": self._stored, "indptr": self._rows + 1}
        whole = part_of(self._path)
        whole.unlink(missing_ok=True)  # it might be a link to another file
        with ZipFile(whole, "x") as zipped:
            for name, array in self._arrays.items():
                array.close()
                _move(part_of(array.path), zipped, name, sizes[name])
            for name, value in (("shape", np.array([self._rows, self._width])), ("format", np.array(b"csr"))):
                with zipped.open(ZipInfo(f"{name}.npy"), "w") as member:
                    np.lib.format.write_array(member, value)


def _move(numbers: Path, zipped: ZipFile, name: str, size: int) -> None:
    """Add an array of so many numbers in a file, which is then gone."""
    with zipped.open(ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member, numbers.open("rb") as stream:
        header = {"descr": _GROWING[name], "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(member, header)
        shutil.copyfileobj(stream, member, 1024 * 1024)
    numbers.unlink()
