"""The one loop that takes a job's results to where they go, chunk after chunk, while the job runs or after its end.

Nothing is noted. Whatever dies, the results are still in Redis, and the next call asks the destination what it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from embedctl.store import JobStatus
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import JobError, OutputError
from embedctl_config.record_ids import RecordId

T = TypeVar("T")

Progress = Callable[[JobStatus], None]
Written = Callable[[ChunkVectors], None]


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record with a vector that the destination does not take: its position, its id if it has one, and why."""

    position: int
    id: RecordId | None
    reason: str


Refused = Callable[[RefusedRecord], None]


def ignore(_: object) -> None:
    """Do nothing with what is told."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the caller of a delivery is told, and is asked: see :meth:`Job.deliver`. `stopped` tells whether it wants no
    more."""

    progress: Progress | None = None
    written: Written = ignore
    refused: Refused = ignore
    stopped: Callable[[], bool] = lambda: False


#: Nobody is told anything.
NOBODY = Callbacks()


class BeginAgain(Exception):
    """Raised by what has to be given all chunks once more, the first one included."""


@dataclass(slots=True)
class Delivered:
    """What became of a job's records. Each counts once.

    Attributes:
        written: records that this call wrote.
        unchanged: those that were there already, made from the same text.
        refused: those that have a vector and that the destination does not take.
        failed: those without a vector.
        left_out: those that are not written, because another one has their id.
        not_encoded: those that the job was ended without.
        files: the full names of the files that hold them.
    """

    written: int = 0
    unchanged: int = 0
    refused: int = 0
    failed: int = 0
    left_out: int = 0
    not_encoded: int = 0
    files: Sequence[Path | str] = field(default=(), compare=False)

    @property
    def counts(self) -> Mapping[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "files"}

    def check(self, records: int) -> None:
        """Raise OutputError unless each record of a job is accounted for."""
        if (total := sum(self.counts.values())) != records:
            words = " + ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in self.counts.items())
            raise OutputError(f"the job has {records:,} records, and {words} makes {total:,}: run the command again")


class Taker(ABC, Generic[T]):
    """What takes a job's chunks, in order, to one destination. `done` is what became of the records so far."""

    done: Delivered

    @abstractmethod
    def take(self, chunk: T) -> None:
        """Take a chunk, with its failed records; BeginAgain if it has to be given all chunks once more."""

    @abstractmethod
    def end(self) -> None:
        """Write what is left after the last chunk."""

    @abstractmethod
    def close(self) -> None:
        """Finish what only the end can, when each record is accounted for."""

    @abstractmethod
    def cut_short(self, error: JobError) -> None:
        """Keep what there is of a job that can't be read to its end. May raise the same error in better words."""


def run(results: Callable[[], Iterator[T]], taker: Taker[T], status: Callable[[], JobStatus]) -> None:
    """Take all results of a job to where they go, and check that the records add up. :class:`JobError`: the results
    can't be read to their end."""
    try:
        _take_all(results, taker)
    except JobError as error:
        taker.cut_short(error)
        raise
    taker.end()
    ended = status()
    if ended.stopped_by is not None:
        taker.done.not_encoded = ended.records - ended.done - ended.failed
    taker.done.check(ended.records)
    taker.close()


def _take_all(results: Callable[[], Iterator[T]], taker: Taker[T]) -> None:
    while True:
        try:
            for chunk in results():
                taker.take(chunk)
        except BeginAgain:
            continue
        return
