"""Vectors in a temporary file without a name, which is gone however the process ends."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embedctl.digests import DIGEST_BYTES, Digests
from embedctl.results import Vectors

#: The numbers of tokens of a text that was cut: used and lost; zeros for one that was not.
Cut = tuple[int, int]


class Copied(NamedTuple):
    """Vectors that are to be copied.

    Attributes:
        vectors: float32, records × dimensions.
        cuts: how much of each text was cut.
        digests: uint8, records × 32, the digests of the texts that the vectors are of.
    """

    vectors: Vectors
    cuts: list[Cut]
    digests: Digests


class Spool:
    """Vectors by number, each with the digest of its text.

    Args:
        dim: dimensions of a vector.
        folder: where the file has room; the folder of temporary files if None.
    """

    def __init__(self, dim: int, folder: Path | None = None) -> None:
        self.dim = dim
        self._dtype = np.dtype([("digest", "u1", (DIGEST_BYTES,)), ("cut", "<u4", (2,)), ("vector", "<f4", (dim,))])
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (it lives as long as this object)

    def write(self, first: int, copied: Copied) -> None:
        """Write vectors of consecutive numbers.

        Raises:
            OSError: there is no room.
        """
        made = np.empty(len(copied.vectors), self._dtype)
        made["vector"], made["cut"] = copied.vectors, np.asarray(copied.cuts, np.uint32).reshape(-1, 2)
        made["digest"] = copied.digests
        self._file.seek(first * self._dtype.itemsize)
        self._file.write(made.tobytes())

    def take(self, numbers: npt.NDArray[np.int64]) -> Copied:
        """The vectors of some numbers."""
        made = np.empty(len(numbers), self._dtype)
        for at, number in enumerate(numbers.tolist()):
            self._file.seek(number * self._dtype.itemsize)
            made[at] = np.frombuffer(self._file.read(self._dtype.itemsize), self._dtype)[0]
        cuts = [(used, lost) for used, lost in made["cut"].tolist()]
        return Copied(made["vector"].copy(), cuts, made["digest"].copy())
