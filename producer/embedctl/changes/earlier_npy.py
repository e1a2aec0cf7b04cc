"""An earlier output in a .npy, with the files next to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from embedctl.changes.earlier import Earlier, EarlierRows, Rows, check_numbers, no_digests
from embedctl.changes.spool import Copied
from embedctl.destinations.about import ABOUT, About
from embedctl.destinations.digest_rows import FILES, digest_of
from embedctl.destinations.npy import about_beside, beside, digests_beside
from embedctl.destinations.numbers import Numbers, OutputType
from embedctl.digests import DIGEST_BYTES, Digests
from embedctl_config.errors import OutputError

_ROWS = 8192
#: A file of this size is read at once (bytes).
_SMALL = 1024 * 1024


class NpyEarlier(Earlier):
    """An array, its digests, its ids and its errors. They are compared with the checksums in `NAME.about.json` first,
    because one of several files may have been replaced without the others.

    Args:
        path: of the array.
    """

    def __init__(self, path: Path, numbers: Numbers | None) -> None:
        self.name = str(path)
        self._path = path
        told = about_beside(path)
        if not told.exists() or not digests_beside(path).exists():
            raise no_digests(self.name)
        try:
            self._check(told)
            # An empty array can't be mapped.
            mode: Literal["r"] | None = "r" if path.stat().st_size > _SMALL else None
            self._array: npt.NDArray[Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
            size = digests_beside(path).stat().st_size
            digests = np.memmap(digests_beside(path), np.uint8, "r") if size else np.empty(0, np.uint8)
            self._digests: Digests = digests.reshape(-1, DIGEST_BYTES)
            self._failed = {int(row["position"]) for row in _lines(beside(path)["errors"])}
            self._cuts = {
                int(row["position"]): (int(row["used"]), int(row["lost"])) for row in _lines(beside(path)["truncated"])
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OutputError(
                f"{path} can't be read: {error}. Restore it, or give --force to encode everything"
            ) from error
        if self._array.ndim != 2 or len(self._array) != len(self._digests):
            raise OutputError(f"{path} and {digests_beside(path)} do not belong together: give --force")
        kinds = {"float32": OutputType.FLOAT32, "float16": OutputType.FLOAT16, "int8": OutputType.INT8}
        stored = kinds.get(self._array.dtype.name, OutputType.UBINARY)
        check_numbers(self.name, Numbers(stored), numbers)
        self.rows, self.dim = len(self._array), self._array.shape[1]

    def read(self) -> Iterator[EarlierRows]:
        ids = iter(_lines(beside(self._path)["ids"]))
        for first in range(0, self.rows, _ROWS):
            digests = np.array(self._digests[first : first + _ROWS])
            labels = [next(ids, None) for _ in range(len(digests))]
            usable = [first + at not in self._failed for at in range(len(digests))]
            yield EarlierRows(digests, labels, digests.any(axis=1) & np.array(usable, bool))

    def take(self, rows: Rows) -> Copied:
        vectors = self._array[rows].astype(np.float32, copy=False)
        cuts = [self._cuts.get(row, (0, 0)) for row in rows.tolist()]
        return Copied(vectors, cuts, np.array(self._digests[rows]))

    def _check(self, told: Path) -> None:
        facts = json.loads(told.read_text(encoding="utf-8"))
        self.about = About.parse(facts[ABOUT], str(told))
        needed = {self._path.name, digests_beside(self._path).name}
        optional = {file.name: file for file in beside(self._path).values()}
        if not needed <= facts[FILES].keys() or any(
            file.exists() and name not in facts[FILES] for name, file in optional.items()
        ):
            raise OutputError(f"{told} does not name all files next to {self._path}: they are of another output")
        for name, sha256 in facts[FILES].items():
            file = told.with_name(name)
            if digest_of(file)[0] != sha256:
                raise OutputError(
                    f"{file} is not the file that was written with {told}: restore both, or give --force to encode "
                    "everything"
                )


def _lines(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines; none if there is no such file."""
    if path.exists():
        with path.open("rb") as lines:
            yield from map(json.loads, lines)
