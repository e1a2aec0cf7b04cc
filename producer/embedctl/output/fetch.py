"""Writes a job's results to a file, during the job or after its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Protocol

from embedctl.job import Job
from embedctl.output.npy import beside
from embedctl.output.parts import Progress, locked, part_of
from embedctl.results import ChunkVectors
from embedctl.store import JobStatus
from embedctl_config.errors import BrokerUnavailable, JobError, JobNotFound, JobStalled, OutputError, SettingsError

log = logging.getLogger(__name__)

_WRITERS = {
    "npy": "embedctl.output.npy:NpyWriter",
    "jsonl": "embedctl.output.jsonl:JsonlWriter",
    "parquet": "embedctl.output.parquet:ParquetWriter",
}
FORMATS = tuple(_WRITERS)
#: After a fetch died, the next one repeats at most this much of its work (seconds).
_NOTE_EVERY_S = 2.0


class Writer(Protocol):
    """Writes chunks under a temporary name.

    Its arguments are the final path, the number of the job's records and the last checkpoint, or None.
    """

    #: Whether the number of records must be known before the first chunk is written.
    needs_total: bool

    def __init__(self, path: Path, records: int, noted: Mapping[str, int] | None) -> None: ...

    def write(self, chunk: ChunkVectors) -> None:
        """Add a chunk."""
        ...

    def checkpoint(self) -> Mapping[str, int] | None:
        """Flush. Returns what a new writer needs to go on from here, or None if it can't."""
        ...

    def finish(self) -> list[Path]:
        """Give the files their final names, and return these."""
        ...

    def close(self) -> None:
        """Close the files, and keep them."""
        ...

    def discard(self) -> None:
        """Remove the files."""
        ...


def fetch(
    job: Job,
    path: Path,
    *,
    file_format: str | None = None,
    progress: Callable[[JobStatus], None] | None = None,
    written: Callable[[ChunkVectors], None] | None = None,
    clobber: bool = True,
) -> list[Path]:
    """Write a job's results to a file as they arrive, in input order. Memory holds one chunk at a time.

    Waits for unfinished chunks. If a fetch dies, the next one to the same file continues where it stopped (parquet
    begins again).

    Args:
        file_format: npy, jsonl or parquet; by the path's suffix if None.
        progress: as for :meth:`Job.wait`.
        written: called with each chunk once it is in the file.
        clobber: whether to replace a file that exists, and the unfinished file of another job.

    Returns:
        The written files, `path` first.

    Raises:
        OutputError: the file can't be written, exists and must not be replaced, or another fetch is writing it.
        MissingExtra: parquet without pyarrow.
        JobCancelled, JobFailed, BrokerUnavailable: as for :meth:`Job.iter_results`.
        JobNotFound, JobLost, JobStalled: the job is gone, or its producer is. What was fetched stays where the message
            says.
    """
    chosen = file_format or guess_format(path)
    try:
        with locked(path):
            if not clobber:
                # Again, because another process may have written the file, or a part of it, since the command began.
                _refuse_to_clobber(path, chosen)
                _refuse_part_of_another(path, job)
            return _fetch(job, path, chosen, _writer(chosen), progress, written)
    except BrokerUnavailable:  # also an OSError, but one of Redis
        raise
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or error}") from error


def check_output(path: Path, *, clobber: bool = True) -> None:
    """Check beforehand that vectors can be written to a path.

    Args:
        clobber: whether files that exist may be replaced.

    Raises:
        SettingsError: the path has no suffix of a known format.
        OutputError: the folder is missing, or not writable; or a file exists that must not be replaced.
        MissingExtra: parquet without pyarrow.
    """
    file_format = guess_format(path)
    _writer(file_format)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{path} can't be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK) or path.is_dir():
        raise OutputError(f"{path} can't be written: permission denied, or it is a folder")
    if not clobber:
        _refuse_to_clobber(path, file_format)


def files_of(path: Path) -> list[Path]:
    """The files that :func:`fetch` may write for a path, `path` first."""
    from embedctl.output.npy import BESIDE

    beside = [path.with_suffix(f".{kind}.jsonl") for kind in BESIDE] if path.suffix == ".npy" else []
    return [path, *beside]


def guess_format(path: Path) -> str:
    """The format by a file's suffix.

    Raises:
        SettingsError: the suffix is unknown.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise SettingsError(f"{path}: name it .{', .'.join(FORMATS)}")
    return suffix


def _writer(file_format: str) -> type[Writer]:
    module, _, name = _WRITERS[file_format].partition(":")
    writer: type[Writer] = getattr(import_module(module), name)
    return writer


def _refuse_to_clobber(path: Path, file_format: str) -> None:
    for file in (path, *(beside(path).values() if file_format == "npy" else ())):
        if os.path.lexists(file):
            raise OutputError(f"{file} exists: remove it, choose another file, or omit --no-clobber to replace it")


def _refuse_part_of_another(path: Path, job: Job) -> None:
    """Refuse to begin again over what an earlier fetch of another job has written."""
    if other := Progress(path, {"job": job.id}).other("job"):
        raise OutputError(
            f"{part_of(path)} holds vectors of job {other}, which is not fetched in full: choose another file, or "
            "omit --no-clobber to replace them"
        )


def _fetch(
    job: Job,
    path: Path,
    file_format: str,
    make_writer: type[Writer],
    progress: Callable[[JobStatus], None] | None,
    written: Callable[[ChunkVectors], None] | None,
) -> list[Path]:
    if make_writer.needs_total:
        job.wait_until_sealed(progress)
    status = job.status()
    # A retry of failed records may change rows that an earlier fetch has written.
    retried = status.chunks - (status.original_chunks or status.chunks)
    note = Progress(path, {"job": job.id, "format": file_format, "retried": retried})
    writer, chunks = _taken_up(make_writer, path, status.records, note)
    next_note = time.monotonic() + _NOTE_EVERY_S
    try:
        for chunk in job.iter_results(start=chunks, progress=progress):
            writer.write(chunk)
            chunks += 1
            if written is not None:
                written(chunk)
            if time.monotonic() >= next_note:
                facts = writer.checkpoint()
                if facts is not None:
                    note.save({**facts, "chunks": chunks})
                next_note = time.monotonic() + _NOTE_EVERY_S
        files = writer.finish()
    except BrokerUnavailable:  # the written part stays for the next fetch
        writer.close()
        raise
    except OSError:
        # The disk may be full: free the space. The file can't be trusted any more. Closing flushes, and fails again.
        with suppress(OSError):
            writer.close()
        writer.discard()
        note.clear()
        raise
    except (JobNotFound, JobStalled) as error:  # the fetched part may be the only copy; a lost or stalled job may go on
        if not chunks:
            writer.close()
            writer.discard()
            raise
        facts = writer.checkpoint()
        if facts is not None:
            note.save({**facts, "chunks": chunks})
        writer.close()
        raise type(error)(f"{error} The {chunks} chunks fetched so far stay in {part_of(path)}.") from error
    except JobError:
        writer.close()
        writer.discard()
        note.clear()
        raise
    except BaseException:
        writer.close()
        raise
    note.clear()
    return files


def _taken_up(make_writer: type[Writer], path: Path, records: int, note: Progress) -> tuple[Writer, int]:
    """A writer, and the number of chunks that it holds already; 0 if the files do not match their progress note."""
    noted = note.load()
    if noted is not None:
        try:
            return make_writer(path, records, noted), noted["chunks"]
        except (OSError, ValueError):
            log.warning("%s: can't continue an earlier fetch; beginning again", path)
    # From here on, the part files belong to this fetch, so no later fetch may trust an older progress note.
    note.clear()
    return make_writer(path, records, None), 0
