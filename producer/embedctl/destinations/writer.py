"""What a writer of a file is given, and what it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from embedctl.corpus.kept import tells_tokens
from embedctl.destinations.interface import Contract
from embedctl.destinations.numbers import FLOAT32, Numbers
from embedctl.destinations.unfinished import part_of
from embedctl.store import JobStatus
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import JobError


@dataclass(frozen=True, slots=True)
class Content:
    """What a file is to hold, of a job with so many records and these kept fields: `tokens` if columns tell those of
    each record. `about` tells at the end what the vectors are; None if the job has no digests. `column_types`
    are those of the corpus."""

    path: Path
    records: int
    keep: Sequence[str] = ()
    numbers: Numbers = FLOAT32
    tokens: bool = False
    about: Callable[[], Contract] | None = None
    column_types: Mapping[str, str] | None = None

    @classmethod
    def of(cls, job: JobStatus, path: Path, numbers: Numbers, about: Callable[[], Contract]) -> Self:
        """All of a job's results."""
        options = job.options
        digests = about if options.get("digests") else None
        types = options.get("column_types")
        return cls(path, job.records, options.get("keep", ()), numbers, tells_tokens(options), digests, types)


class Writer(ABC):
    """Writes chunks under temporary names; `paths` are the final ones of all files that it may write. Every method
    raises OSError if the disk refuses."""

    paths: list[Path]

    @abstractmethod
    def write(self, chunk: ChunkVectors) -> None:
        """Add a chunk; BeginAgain if the writer needs all chunks once more, from the first one."""

    @abstractmethod
    def finish(self) -> list[Path]:
        """Give the files their final names, and return these."""

    @abstractmethod
    def close(self) -> None:
        """Close the files, and keep them. May be repeated."""

    def gives_up(self, _: JobError) -> bool:
        """Whether :meth:`finish` makes a whole file of a job that can't be read to its end, for this reason."""
        return False

    def discard(self) -> None:
        """Close the files, and remove those that have no final name."""
        with suppress(OSError, ValueError):  # closing flushes; a full disk refuses once more
            self.close()
        for path in self.paths:
            part_of(path).unlink(missing_ok=True)

    def keep(self, job_id: str) -> Path | None:
        """Close the files of a job that nobody can read once more, under names that no other job takes; returns the
        first one's."""
        self.close()
        kept = {path: path.with_name(f".{path.name}.{job_id}.part") for path in self.paths if part_of(path).exists()}
        for path, name in kept.items():
            part_of(path).replace(name)
        return next(iter(kept.values()), None)
