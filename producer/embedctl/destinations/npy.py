"""`.npy`: one array, records × dimensions, and separate files for ids, errors, truncations and ranges."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import DIGEST_BYTES
from embedctl.destinations.interface import ABOUT, Contract
from embedctl.destinations.unfinished import LineFile, digest_of, json_line, json_lines, part_of, publish
from embedctl.destinations.writer import Content, Writer
from embedctl.waiting.results import ChunkVectors
from embedctl_config import durable
from embedctl_config.record_ids import to_json

#: The formats that have these files next to them.
ARRAYS = ("npy", "npz")
#: The files of lines next to `NAME.npy`, such as `NAME.ids.jsonl`.
LINES = ("ids", "errors", "truncated")
#: All files next to it, by kind. `ranges`, of int8, are float32, 2 × dimensions; `digests` the SHA-256 of each record's
#: text, 32 bytes a row; `about`, of an array with digests, says what it holds.
_BESIDE = {
    **{kind: f"{kind}.jsonl" for kind in LINES},
    "ranges": "ranges.npy",
    "digests": "digests.bin",
    "about": "about.json",
}
#: The entry of the file that says what an array holds: the sha256 of each file, by name.
FILES = "files"
_NOT_ENCODED = "the job was ended before it came to this record"


def beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name.removesuffix('.npy')}.{_BESIDE[kind]}")


def all_beside(path: Path) -> list[Path]:
    return [beside(path, kind) for kind in _BESIDE]


class NpyWriter(Writer):
    """Writes vectors into a preallocated array. The row of a record that failed, or that was not encoded, is NaN; in
    int8 and binary it is 0, and `errors` names both.

    The files next to it have an id or null per record (`ids`, as in .jsonl), an object per failed record (`errors`) and
    an object per truncated record (`truncated`). Each file exists only if it has content. If the job has digests, there
    are two files more.
    """

    def __init__(self, content: Content) -> None:
        self._path = content.path
        self.paths = [content.path, *all_beside(content.path)]
        self._numbers = content.numbers
        self._records = content.records
        self._about = content.about
        self._array: npt.NDArray[Any] | None = None
        self._rows = 0
        #: Whether the row of a record that was not encoded says so by itself.
        self._rows_tell = content.numbers.has_nan
        #: All files but that which comes last, and the kinds of those that have content.
        self._files = {
            kind: LineFile(beside(content.path, kind), b"\n" if kind in LINES else b"")
            for kind in _BESIDE
            if kind != "about"
        }
        self._said = set[str]() if content.about is None else {"digests"}

    def write(self, chunk: ChunkVectors) -> None:
        self._put(chunk)
        gaps = np.flatnonzero(np.diff(chunk.positions) > 1) + 1  # where the job was ended, in what is merged with it
        for first, end in zip([0, *gaps], [*gaps, len(chunk.positions)], strict=True):
            if first == end:
                continue
            self._skip_to(int(chunk.positions[first]))
            self._rows = int(chunk.positions[end - 1]) + 1
            self._files["ids"].write([json_lines(map(to_json, chunk.ids[first:end]))])
            if self._about is not None:
                none = bytes((end - first) * DIGEST_BYTES)
                self._files["digests"].write([none if chunk.digests is None else chunk.digests[first:end].tobytes()])
        if any(label is not None for label in chunk.ids):
            self._said.add("ids")
        for error in chunk.errors:
            self._say(
                "errors", position=error.position, id=to_json(error.id), code=error.code.value, message=error.message
            )
        for cut in chunk.truncations:
            self._say("truncated", position=cut.position, id=to_json(cut.id), used=cut.used, lost=cut.lost)

    def finish(self) -> list[Path]:
        self._skip_to(self._records)
        self._complete()
        if self._numbers.ranges is not None:
            self._said.add("ranges")
            np.save(ranges := io.BytesIO(), self._numbers.ranges)
            self._files["ranges"].write([ranges.getvalue()])
        self.close()
        about = None if self._about is None else self._about()
        durable.remove(beside(self._path, "about"))  # before what it vouches for is replaced
        written = [self._path]
        for kind, file in self._files.items():
            written += file.publish(kept=kind in self._said)
        publish(self._path)
        if about is not None:
            written.append(self._vouched(about, written))
        return written

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _put(self, chunk: ChunkVectors) -> None:
        """Store the vectors of a chunk, under a temporary name."""
        if self._array is None:
            self._array = self._preallocated(chunk.vectors.shape[1])
        self._array[chunk.positions] = self._numbers.of(chunk.vectors)

    def _complete(self) -> None:
        if self._array is None:
            self._array = self._preallocated(0)
        if isinstance(self._array, np.memmap):
            self._array.flush()

    def _vouched(self, about: Contract, files: Sequence[Path]) -> Path:
        """Say what the array and the files next to it, which have their final names, hold; returns the file that does.
        It comes last, so it vouches for no mixture of two arrays."""
        facts = {ABOUT: about.text, FILES: {file.name: digest_of(file)[0] for file in files}}
        file = LineFile(beside(self._path, "about"), b"")
        file.write([json.dumps(facts).encode()])
        file.close()
        file.publish()
        return file.path

    def _skip_to(self, row: int) -> None:
        """Fill the rows of the records before this one that were not encoded, because the job was ended."""
        if self._array is not None and self._rows_tell:
            self._array[self._rows : row] = np.nan
        if self._about is not None:
            self._files["digests"].write([bytes((row - self._rows) * DIGEST_BYTES)])
        for position in range(self._rows, row):
            self._files["ids"].write([json_line(None)])
            if not self._rows_tell:
                self._say("errors", position=position, id=None, code="stopped", message=_NOT_ENCODED)
        self._rows = row

    def _preallocated(self, dim: int) -> npt.NDArray[Any]:
        shape = self._records, self._numbers.width(dim)
        return _preallocated(part_of(self._path), shape, self._numbers.dtype)

    def _say(self, kind: str, **fields: object) -> None:
        self._said.add(kind)
        self._files[kind].write([json_line(fields)])


def _preallocated(path: Path, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    path.unlink(missing_ok=True)  # it might be a link to another file
    if 0 in shape:  # an empty file can't be mapped
        empty = np.empty(shape, dtype)
        with path.open("wb") as stream:
            np.save(stream, empty)
        return empty
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    # Writing to a mapped page on a full disk kills the process; allocating beforehand raises an error instead.
    with path.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
    return mapped
