"""Compares two sets of records by the digests of their texts, among more of them than fit into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embedctl.digests import DIGEST_BYTES, Digests
from embedctl.runs import Entries, Runs, starts_of

#: A record: the whole digest of its text, a part of the digest of its id, and its place. The id only decides between
#: records with equal texts, so a part of its digest will do.
ENTRY: np.dtype[np.void] = np.dtype(
    [*((name, "<u8") for name in ("d0", "d1", "d2", "d3")), ("id", "<u8"), ("at", "<u8")]
)
#: Entries in memory; more of them go to the disk.
_HELD = 2**17
#: Of temporary files.
COST = "comparing the corpus takes up to 200 bytes for each record"
_DIGEST = ("d0", "d1", "d2", "d3")
_NONE = np.iinfo(np.uint64).max


def spilled(dtype: np.dtype[np.void]) -> Runs:
    """Room for many entries."""
    return Runs(dtype, _HELD, COST)


def entries(digests: Digests, ids: Sequence[str | None], first: int) -> Entries:
    """The entries of records at places from `first` on."""
    made = np.empty(len(digests), ENTRY)
    words = np.ascontiguousarray(digests).view("<u8")
    for column, name in enumerate(_DIGEST):
        made[name] = words[:, column]
    made["id"] = np.frombuffer(b"".join(map(_short, ids)), "<u8")
    made["at"] = np.arange(first, first + len(digests), dtype=np.uint64)
    return made


def digests_of(some: Entries) -> Digests:
    """The digests of entries."""
    words = np.stack([some[name] for name in _DIGEST], axis=1) if len(some) else np.empty((0, 4), "<u8")
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1, DIGEST_BYTES)


def places_in(old: Entries, new: Entries) -> npt.NDArray[np.int64]:
    """For each new entry, the place of an old one with the same digest; -1 where there is none.

    Among several, one with the same id is chosen: of n equal records, the nth. Else the first one.
    """
    every = np.concatenate([old, new])
    is_new = np.arange(len(every)) >= len(old)
    order = np.lexsort((every["at"], is_new, every["id"], *(every[name] for name in reversed(_DIGEST))))
    every, is_new = every[order], is_new[order]
    starts = starts_of(every, _DIGEST)  # of equal digests
    pair_starts = starts | starts_of(every, ("id",))  # of equal digests and ids: first the old ones, then the new ones
    at = np.arange(len(every))
    pair = np.cumsum(pair_starts) - 1
    first = np.flatnonzero(pair_starts)
    old_in_pair = np.add.reduceat((~is_new).astype(np.int64), first) if len(first) else np.empty(0, np.int64)
    rank = at - first[pair] - old_in_pair[pair]
    same_id = first[pair] + np.clip(np.minimum(rank, old_in_pair[pair] - 1), 0, None)
    places = every["at"].copy()
    group = np.flatnonzero(starts)
    least = np.minimum.reduceat(np.where(is_new, _NONE, places), group) if len(group) else np.empty(0, np.uint64)
    found = np.where(old_in_pair[pair] > 0, places[same_id], least[np.cumsum(starts) - 1])
    result = np.full(len(new), -1, np.int64)
    there = is_new & (found != _NONE)
    result[order[there] - len(old)] = found[there].astype(np.int64)
    return result


def _short(label: str | None) -> bytes:
    return bytes(8) if label is None else hashlib.blake2b(label.encode(), digest_size=8).digest()
