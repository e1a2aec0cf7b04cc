"""Compares two sets of records by the digests of their texts, among more of them than fit into memory."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from embedctl.digests import DIGEST_BYTES, Digests
from embedctl_config.errors import InputError

#: A record: the whole digest of its text, a part of the digest of its id, and its place. The id only decides between
#: records with equal texts, so a part of its digest will do.
ENTRY: np.dtype[np.void] = np.dtype(
    [*((name, "<u8") for name in ("d0", "d1", "d2", "d3")), ("id", "<u8"), ("at", "<u8")]
)
#: A name of a record, as 128 bits of a digest, and its place.
NAME: np.dtype[np.void] = np.dtype([("d0", "<u8"), ("d1", "<u8"), ("at", "<u8")])
Entries = npt.NDArray[np.void]
#: Entries in memory; more of them go to the disk.
_HELD = 2**17
#: Files on the disk: the first byte of the digest decides. Of 100 million records, each has 19 MB.
_FILES = 256
_DIGEST = ("d0", "d1", "d2", "d3")
_NONE = np.iinfo(np.uint64).max


class Spilled:
    """Entries that are on the disk where they are many. A context manager, which removes them.

    Args:
        dtype: ENTRY or NAME.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
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
        """Whether entries are on the disk."""
        return self._folder is not None

    def add(self, entries: Entries) -> None:
        """Take some entries.

        Raises:
            InputError: there is no room for temporary files.
        """
        self._held.append(entries)
        self._count += len(entries)
        if self._count >= _HELD:
            with explained():
                self._spill()

    def part(self, number: int | None) -> Entries:
        """The entries of one file; all of them for None, if none is on the disk."""
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
            self._folder = tempfile.TemporaryDirectory(prefix="embedctl-changes-")
        held = np.concatenate(self._held)
        order = np.argsort(_file_of(held), kind="stable")
        ends = np.searchsorted(_file_of(held)[order], np.arange(_FILES), side="right")
        for number, part in enumerate(np.split(held[order], ends[:-1])):
            if len(part):
                with Path(self._folder.name, str(number)).open("ab") as stream:
                    stream.write(part.tobytes())
        self._held, self._count = [], 0


def parts_of(one: Spilled, other: Spilled) -> Iterator[tuple[Entries, Entries]]:
    """The entries of two sets, in such parts that equal digests are in the same one."""
    numbers = range(_FILES) if one.on_disk or other.on_disk else (None,)
    return ((one.part(number), other.part(number)) for number in numbers)


def entries(digests: Digests, ids: Sequence[str | None], first: int) -> Entries:
    """The entries of records at places from `first` on."""
    made = np.empty(len(digests), ENTRY)
    words = np.ascontiguousarray(digests).view("<u8")
    for column, name in enumerate(_DIGEST):
        made[name] = words[:, column]
    made["id"] = np.frombuffer(b"".join(map(_short, ids)), "<u8")
    made["at"] = np.arange(first, first + len(digests), dtype=np.uint64)
    return made


def names(digests: Digests, ids: Sequence[str | None], first: int) -> Entries:
    """The names of records: their ids, or of a record without an id, its text."""
    made = np.empty(len(digests), NAME)
    each = b"".join(
        digest.tobytes()[:16] if label is None else hashlib.blake2b(label.encode(), digest_size=16).digest()
        for digest, label in zip(digests, ids, strict=True)
    )
    words = np.frombuffer(each, "<u8").reshape(-1, 2)
    made["d0"], made["d1"] = words[:, 0], words[:, 1]
    made["at"] = np.arange(first, first + len(digests), dtype=np.uint64)
    return made


def digests_of(some: Entries) -> Digests:
    """The digests of entries."""
    words = np.stack([some[name] for name in _DIGEST], axis=1) if len(some) else np.empty((0, 4), "<u8")
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1, DIGEST_BYTES)


def places_in(old: Entries, new: Entries, *, same_ids: bool = False) -> npt.NDArray[np.int64]:
    """For each new entry, the place of an old one with the same digest; -1 where there is none.

    Among several, one with the same id is chosen: of n equal records, the nth. Else the first one, or none with
    `same_ids`.
    """
    every = np.concatenate([old, new])
    is_new = np.arange(len(every)) >= len(old)
    order = np.lexsort((every["at"], is_new, every["id"], *(every[name] for name in reversed(_DIGEST))))
    every, is_new = every[order], is_new[order]
    starts = _changes(every, _DIGEST)  # of equal digests
    pair_starts = starts | _changes(every, ("id",))  # of equal digests and ids: first the old ones, then the new ones
    at = np.arange(len(every))
    pair = np.cumsum(pair_starts) - 1
    first = np.flatnonzero(pair_starts)
    old_in_pair = np.add.reduceat((~is_new).astype(np.int64), first) if len(first) else np.empty(0, np.int64)
    rank = at - first[pair] - old_in_pair[pair]
    same_id = first[pair] + np.clip(np.minimum(rank, old_in_pair[pair] - 1), 0, None)
    places = every["at"].copy()
    group = np.flatnonzero(starts)
    least = np.minimum.reduceat(np.where(is_new, _NONE, places), group) if len(group) else np.empty(0, np.uint64)
    others = np.full(len(every), _NONE) if same_ids else least[np.cumsum(starts) - 1]
    found = np.where(old_in_pair[pair] > 0, places[same_id], others)
    result = np.full(len(new), -1, np.int64)
    there = is_new & (found != _NONE)
    result[order[there] - len(old)] = found[there].astype(np.int64)
    return result


def missing_in(old: Entries, new: Entries) -> npt.NDArray[np.int64]:
    """The places of the old names that no new one is equal to; of equal names, the first place alone."""
    every = np.concatenate([old, new])
    is_new = np.arange(len(every)) >= len(old)
    order = np.lexsort((every["at"], is_new, every["d1"], every["d0"]))
    every, is_new = every[order], is_new[order]
    starts = _changes(every, ("d0", "d1"))
    group = np.flatnonzero(starts)
    has_new = np.logical_or.reduceat(is_new, group) if len(group) else np.empty(0, bool)
    return every["at"][group[~has_new]].astype(np.int64)


@contextmanager
def explained() -> Iterator[None]:
    """Explains a full disk of temporary files.

    Raises:
        InputError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"comparing the corpus takes up to 200 bytes for each record in {tempfile.gettempdir()}: {error.strerror}. "
            "Make room there, or set TMPDIR"
        ) from error


def _changes(sorted_entries: Entries, columns: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Where one of these columns has another value than in the entry before."""
    new = np.ones(len(sorted_entries), bool)
    new[1:] = np.logical_or.reduce([sorted_entries[name][1:] != sorted_entries[name][:-1] for name in columns])
    return new


def _file_of(some: Entries) -> npt.NDArray[np.uint64]:
    return some["d0"] % np.uint64(_FILES)


def _short(label: str | None) -> bytes:
    return bytes(8) if label is None else hashlib.blake2b(label.encode(), digest_size=8).digest()
