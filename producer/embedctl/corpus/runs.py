"""Entries in the order of a digest, among more of them than fit into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from embedctl_config.errors import InputError

#: An id, or what stands for one, and where it stands. The digest is 128 bits long: among 100 million ids, two that
#: differ have the same one with a probability of 1e-23.
NAME: np.dtype[np.void] = np.dtype([("d0", "<u8"), ("d1", "<u8"), ("at", "<u8")])
Entries = npt.NDArray[np.void]
#: Files on the disk, in the order of the digests: the highest byte of `d0` decides. Of 100 million ids, each has 9 MB,
#: and is sorted in memory.
_FILES = 256


class Runs:
    """Entries that are on the disk where they are more than `held`. A context manager, which removes them. The first
    column of `dtype` is `d0`, the beginning of a digest. `cost` says what the disk is needed for, and how much of it,
    if there is no room."""

    def __init__(self, dtype: np.dtype[np.void], held: int, cost: str) -> None:
        self._dtype = dtype
        self._most = held
        self._cost = cost
        self._held: list[Entries] = []
        self._count = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()

    @property
    def on_disk(self) -> bool:
        return self._folder is not None

    def add(self, entries: Entries) -> None:
        """Take some entries; raises InputError if there is no room for temporary files."""
        self._held.append(entries)
        self._count += len(entries)
        if self._count >= self._most:
            with explained(self._cost):
                self._spill()

    def part(self, number: int | None) -> Entries:
        """The entries of one file, in the order in which they came; all of them for None, if none is on the disk."""
        held = np.concatenate(self._held) if self._held else np.empty(0, self._dtype)
        if number is None:
            return held
        held = np.compress(_file_of(held) == number, held)
        if self._folder is None:
            return held
        file = Path(self._folder.name, str(number))
        return np.concatenate([np.fromfile(file, self._dtype), held]) if file.exists() else held

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="embedctl-runs-")
        held = np.concatenate(self._held)
        order = np.argsort(_file_of(held), kind="stable")
        ends = np.searchsorted(_file_of(held)[order], np.arange(_FILES), side="right")
        for number, part in enumerate(np.split(held[order], ends[:-1])):
            if len(part):
                with Path(self._folder.name, str(number)).open("ab") as stream:
                    stream.write(part.tobytes())
        self._held, self._count = [], 0


def parts_of(*runs: Runs) -> Iterator[tuple[Entries, ...]]:
    """The entries of some sets, in such parts that equal digests are in the same one, and lower ones in one before."""
    numbers = range(_FILES) if any(each.on_disk for each in runs) else (None,)
    return (tuple(each.part(number) for each in runs) for number in numbers)


def starts_of(sorted_entries: Entries, columns: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Where one of these columns has another value than in the entry before."""
    new = np.ones(len(sorted_entries), bool)
    new[1:] = np.logical_or.reduce([sorted_entries[name][1:] != sorted_entries[name][:-1] for name in columns])
    return new


@contextmanager
def explained(cost: str) -> Iterator[None]:
    """Raises InputError in place of the OSError of a full disk of temporary files; `cost` is as for :class:`Runs`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{cost} in {tempfile.gettempdir()}: {error.strerror}. Make room there, or set TMPDIR"
        ) from error


def _file_of(some: Entries) -> npt.NDArray[np.uint64]:
    return some["d0"] >> np.uint64(56)
