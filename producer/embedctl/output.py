"""Vectors into files. Nothing half-written ever bears a final name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from embedctl.job import Job
from embedctl_config.errors import JobFailed, OutputError


@dataclass(frozen=True, slots=True)
class Written:
    """The files that a fetch wrote; None where there was nothing to say."""

    vectors: Path
    ids: Path | None
    errors: Path | None
    truncations: Path | None


def write_npy(job: Job, path: Path) -> Written:
    """Write an ended job's vectors to a `.npy` file: float32, records × dimensions, NaN where a record failed.

    Beside `NAME.npy` stand `NAME.ids.jsonl` (one JSON string or null a record) if the job has ids,
    `NAME.errors.jsonl` if records failed, and `NAME.truncated.jsonl` if some were cut; old ones are removed. Memory
    stays at one chunk.

    Raises:
        OutputError: the files can't be written.
        JobFailed: the job has no vector at all; its errors are still written.
        JobUnfinished, JobCancelled, JobLost: as for :meth:`Job.results`.
    """
    status = job.status()
    results = job.results()
    stem = path.with_suffix("") if path.suffix == ".npy" else path
    beside = {kind: stem.with_name(f"{stem.name}.{kind}.jsonl") for kind in ("ids", "errors", "truncated")}
    used: set[str] = set()
    try:
        with ExitStack() as stack:
            temporary = stack.enter_context(_replacing(path))
            files = {kind: stack.enter_context(_replacing_text(name)) for kind, name in beside.items()}
            shape = (status.records, status.dim or 0)
            vectors = _preallocated(temporary, shape)
            for chunk in results:
                vectors[chunk.positions] = chunk.vectors
                if any(label is not None for label in chunk.ids):
                    used.add("ids")
                files["ids"].writelines(json.dumps(label, ensure_ascii=False) + "\n" for label in chunk.ids)
                for error in chunk.errors:
                    _line(
                        files["errors"],
                        position=error.position,
                        id=error.id,
                        code=error.code,
                        message=error.message,
                    )
                for cut in chunk.truncations:
                    _line(files["truncated"], position=cut.position, id=cut.id, used=cut.used, lost=cut.lost)
            if isinstance(vectors, np.memmap):
                vectors.flush()
    except OSError as error:
        raise OutputError(f"{error.filename or path} can't be written: {error.strerror or error}") from error
    used |= {kind for kind, some in (("errors", status.failed), ("truncated", status.truncated)) if some}
    for kind in beside.keys() - used:
        beside[kind].unlink(missing_ok=True)
    if status.records and not status.done:
        raise JobFailed(f"every record of job {job.id} failed; {beside['errors']} says why")
    return Written(
        path,
        *(beside[kind] if kind in used else None for kind in ("ids", "errors", "truncated")),
    )


def _preallocated(path: Path, shape: tuple[int, int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    if 0 in shape:  # nothing can be mapped
        empty = np.empty(shape, np.float32)
        with path.open("wb") as stream:
            np.save(stream, empty)
        return empty
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    # A mapped page that finds the disk full kills the process; asked for beforehand, it is an error.
    with path.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
    return mapped


def _line(stream: IO[str], **fields: object) -> None:
    stream.write(json.dumps(fields, ensure_ascii=False) + "\n")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its name once it is on the disk, and vanishes on any error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _replacing_text(path: Path) -> Iterator[IO[str]]:
    with (
        _replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        yield stream
        stream.flush()
