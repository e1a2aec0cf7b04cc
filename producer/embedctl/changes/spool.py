"""Vectors in a temporary file without a name, which is gone however the process ends."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedctl.results import Vectors

#: The numbers of tokens of a text that was cut: used and lost; zeros for one that was not.
Cut = tuple[int, int]


class Spool:
    """Vectors by number, each with what was cut of its text.

    Args:
        dim: dimensions of a vector.
        folder: where the file has room; the folder of temporary files if None.
    """

    def __init__(self, dim: int, folder: Path | None = None) -> None:
        self.dim = dim
        self._dtype = np.dtype([("cut", "<u4", (2,)), ("vector", "<f4", (dim,))])
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (it lives as long as this object)

    def write(self, first: int, vectors: Vectors, cuts: Sequence[Cut]) -> None:
        """Write vectors of consecutive numbers.

        Args:
            vectors: float32, records × dimensions.

        Raises:
            OSError: there is no room.
        """
        made = np.empty(len(vectors), self._dtype)
        made["vector"], made["cut"] = vectors, np.asarray(cuts, np.uint32).reshape(-1, 2)
        self._file.seek(first * self._dtype.itemsize)
        self._file.write(made.tobytes())

    def take(self, numbers: npt.NDArray[np.int64]) -> tuple[Vectors, list[Cut]]:
        """The vectors of some numbers, float32, records × dimensions; and how much of each text was cut."""
        made = np.empty(len(numbers), self._dtype)
        for at, number in enumerate(numbers.tolist()):
            self._file.seek(number * self._dtype.itemsize)
            made[at] = np.frombuffer(self._file.read(self._dtype.itemsize), self._dtype)[0]
        return made["vector"].copy(), [(used, lost) for used, lost in made["cut"].tolist()]
