"""An earlier output that `--sync` reads: a .parquet, or a .npy with the files next to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import DIGEST_BYTES, Digests
from embedctl.destinations.interface import ABOUT, Contract
from embedctl.destinations.npy import FILES, LINES, beside
from embedctl.destinations.numbers import Dtype, Numbers
from embedctl.destinations.unfinished import digest_of, is_begun
from embedctl.sync.known import Earlier, Rows, check_numbers, no_digests
from embedctl_config.errors import OutputError, SettingsError
from embedctl_config.outputs import Output

_ROWS = 8192
#: A file of this size is read at once (bytes).
_SMALL = 1024 * 1024


def open_earlier(path: Path, numbers: Numbers | None) -> Earlier | None:
    """An earlier output; None if there is none yet, or only a part of it. `numbers` is how the new output stores
    vectors. OutputError: it is damaged, or has no digests. SettingsError: its format is another one, or it stores its
    vectors in another way."""
    if path.suffix == ".parquet":
        from embedctl.sync.earlier_parquet import ParquetEarlier

        return ParquetEarlier(path, numbers) if path.exists() else None
    if path.suffix == ".npy":
        # Its files have their names one after the other, so a writer that died in between leaves a mixture.
        is_whole = path.exists() and (beside(path, "about").exists() or not is_begun(path))
        return NpyEarlier(path, numbers) if is_whole else None
    raise SettingsError(f"--sync takes a .parquet, a .npy or the URL of a database, and {path} is none")


class NpyEarlier(Earlier):
    """An array, its digests and its errors. They are compared with the checksums in `NAME.about.json` first, because
    one of several files may have been replaced without the others."""

    def __init__(self, path: Path, numbers: Numbers | None) -> None:
        self.name = str(path)
        about = beside(path, "about")
        if not about.exists() or not beside(path, "digests").exists():
            raise no_digests(self.name)
        try:
            self.about = _checked(path, about)
            # An empty array can't be mapped.
            mode: Literal["r"] | None = "r" if path.stat().st_size > _SMALL else None
            self._array: npt.NDArray[Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
            size = beside(path, "digests").stat().st_size
            digests = np.memmap(beside(path, "digests"), np.uint8, "r") if size else np.empty(0, np.uint8)
            self._digests: Digests = digests.reshape(-1, DIGEST_BYTES)
            self._failed = np.array([row["position"] for row in _lines(beside(path, "errors"))], np.int64)
            self._cuts = {row["position"]: (row["used"], row["lost"]) for row in _lines(beside(path, "truncated"))}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OutputError(
                f"{path} can't be read: {error}. Restore it, or remove it to encode everything"
            ) from error
        if self._array.ndim != 2 or len(self._array) != len(self._digests):
            raise OutputError(
                f"{path} and {beside(path, 'digests')} do not belong together: restore both, or remove them"
            )
        kinds = {"float32": Dtype.FLOAT32, "float16": Dtype.FLOAT16, "int8": Dtype.INT8}
        stored = kinds.get(self._array.dtype.name, Dtype.BINARY)
        check_numbers(self.name, Numbers(stored), numbers)
        self.rows, self.widths = len(self._array), {Output.DENSE: self._array.shape[1]}

    def digests(self) -> Iterator[Digests]:
        for first in range(0, self.rows, _ROWS):
            digests = np.array(self._digests[first : first + _ROWS])
            digests[self._failed[(self._failed >= first) & (self._failed < first + _ROWS)] - first] = 0
            yield digests

    def rows_at(self, places: npt.NDArray[np.int64]) -> Rows:
        cuts = np.array([self._cuts.get(place, (0, 0)) for place in places.tolist()], np.uint32)
        return Rows(self._digests[places], cuts, self._array[places].astype(np.float32, copy=False))


def _checked(path: Path, about: Path) -> Contract:
    """What an array's vectors are; OutputError if its files are those of two outputs by their checksums."""
    facts = json.loads(about.read_text(encoding="utf-8"))
    needed = {path.name, beside(path, "digests").name}
    there = {file.name for kind in LINES if (file := beside(path, kind)).exists()}
    if not needed | there <= facts[FILES].keys():
        raise OutputError(f"{about} does not name all files next to {path}: they are of another output")
    for name, sha256 in facts[FILES].items():
        file = about.with_name(name)
        if digest_of(file)[0] != sha256:
            raise OutputError(
                f"{file} is not the file that was written with {about}: restore both, or remove them to "
                "encode everything"
            )
    return Contract.in_file(facts[ABOUT], str(about))


def _lines(path: Path) -> Iterator[Any]:
    if path.exists():
        with path.open("rb") as lines:
            yield from map(json.loads, lines)
