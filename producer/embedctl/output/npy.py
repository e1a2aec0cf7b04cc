"""`.npy`: one float32 array, records × dimensions, and separate files for ids, errors and truncations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from embedctl.output.parts import LineFile, json_line, part_of, publish
from embedctl.results import ChunkVectors, Vectors

#: The files next to `NAME.npy`: `NAME.ids.jsonl`, `NAME.errors.jsonl`, `NAME.truncated.jsonl`.
BESIDE = ("ids", "errors", "truncated")


def beside(path: Path) -> dict[str, Path]:
    """The files next to an array, by kind."""
    stem = path.with_suffix("") if path.suffix == ".npy" else path
    return {kind: stem.with_name(f"{stem.name}.{kind}.jsonl") for kind in BESIDE}


class NpyWriter:
    """Writes vectors into a preallocated array; the row of a record that failed, or that was not encoded, is NaN.

    The files next to it have a JSON string or null per record (`ids`), an object per failed record (`errors`) and an
    object per truncated record (`truncated`). Each file exists only if it has content.
    """

    needs_total = True

    def __init__(self, path: Path, records: int, noted: Mapping[str, int] | None, keep: Sequence[str] = ()) -> None:
        self._path = path
        self._records = records
        self._array: Vectors | None = None
        if noted and "rows" not in noted:
            raise ValueError("an older version wrote this note")
        noted = noted or {}
        self._rows = noted.get("rows", 0)
        self._said = {kind: noted.get(f"said_{kind}", 0) for kind in BESIDE}
        self._files = {kind: LineFile(file, noted.get(kind, 0)) for kind, file in beside(path).items()}
        if noted:
            if part_of(path).is_symlink():
                raise ValueError(f"{part_of(path)} is a link")
            self._array = np.lib.format.open_memmap(part_of(path), mode="r+")

    def write(self, chunk: ChunkVectors) -> None:
        if self._array is None:
            self._array = _preallocated(part_of(self._path), (self._records, chunk.vectors.shape[1]))
        if len(chunk.positions):
            self._skip_to(int(chunk.positions[0]))
            self._rows = int(chunk.positions[-1]) + 1
        self._array[chunk.positions] = chunk.vectors
        self._said["ids"] += sum(label is not None for label in chunk.ids)
        for label in chunk.ids:
            self._files["ids"].write(json_line(label))
        for error in chunk.errors:
            self._say("errors", position=error.position, id=error.id, code=error.code.value, message=error.message)
        for cut in chunk.truncations:
            self._say("truncated", position=cut.position, id=cut.id, used=cut.used, lost=cut.lost)

    def checkpoint(self) -> Mapping[str, int]:
        if isinstance(self._array, np.memmap):
            self._array.flush()
        sizes = {kind: file.flush() for kind, file in self._files.items()}
        return {"rows": self._rows, **sizes, **{f"said_{kind}": count for kind, count in self._said.items()}}

    def finish(self) -> list[Path]:
        if self._array is None:
            self._array = _preallocated(part_of(self._path), (self._records, 0))
        self._skip_to(self._records)
        self.checkpoint()
        self.close()
        written = [self._path]
        for kind, file in self._files.items():
            if self._said[kind]:
                publish(file.path)
                written.append(file.path)
            else:
                part_of(file.path).unlink()
                file.path.unlink(missing_ok=True)
        publish(self._path)
        return written

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def discard(self) -> None:
        for path in (self._path, *(file.path for file in self._files.values())):
            part_of(path).unlink(missing_ok=True)

    def _skip_to(self, row: int) -> None:
        """Fill the rows of the records before this one that were not encoded, because the job was ended."""
        if self._array is not None:
            self._array[self._rows : row] = np.nan
        for _ in range(self._rows, row):
            self._files["ids"].write(json_line(None))
        self._rows = row

    def _say(self, kind: str, **fields: object) -> None:
        self._said[kind] += 1
        self._files[kind].write(json_line(fields))


def _preallocated(path: Path, shape: tuple[int, int]) -> Vectors:
    path.unlink(missing_ok=True)  # it might be a link to another file
    if 0 in shape:  # an empty file can't be mapped
        empty = np.empty(shape, np.float32)
        with path.open("wb") as stream:
            np.save(stream, empty)
        return empty
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    # Writing to a mapped page on a full disk kills the process; allocating beforehand raises an error instead.
    with path.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
    return mapped
