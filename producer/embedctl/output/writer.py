"""What a writer of a file is given, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from embedctl.output.about import About
from embedctl.output.numbers import FLOAT32, Numbers
from embedctl.results import ChunkVectors


@dataclass(frozen=True, slots=True)
class Content:
    """What a file is to hold.

    Attributes:
        path: its final name.
        records: of the job.
        noted: the last checkpoint of a writer that died; None to begin.
        keep: the names of the job's kept fields.
        numbers: how vectors are stored.
        tokens: whether columns tell the tokens of each record.
        about: tells at the end what the vectors are; None if the job has no digests.
    """

    path: Path
    records: int
    noted: Mapping[str, int] | None = None
    keep: Sequence[str] = ()
    numbers: Numbers = FLOAT32
    tokens: bool = False
    about: Callable[[], About] | None = None


class Writer(Protocol):
    """Writes chunks under a temporary name."""

    def write(self, chunk: ChunkVectors) -> None:
        """Add a chunk; BeginAgain if the writer needs all chunks once more, from the first one."""
        ...

    def checkpoint(self) -> Mapping[str, int] | None:
        """Flush. Returns what a new writer needs to go on from here, or None if it can't.

        If that writer needs more than the chunks after these, `chunks` is the number of those that it does not need.
        """
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
