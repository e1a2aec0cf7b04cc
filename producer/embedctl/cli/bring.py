"""What an update brings into a database, before the output is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embedctl.broker import Broker
from embedctl.cli.delivery import SinkChoice
from embedctl.job import Job
from embedctl.output.npy import deleted_beside
from embedctl.sinks.deletion import delete_all
from embedctl.sinks.deliver import target_of
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import JobFailed, OutputError

if TYPE_CHECKING:
    from embedctl.changes.merged import Merged


@dataclass(frozen=True, slots=True)
class Brought:
    """What was brought.

    Attributes:
        delivered: records that were written.
        deleted: records that were deleted; those that were not there are not counted.
    """

    delivered: int
    deleted: int


def bring(
    sink: SinkChoice, results: Merged, job: Job | None, output: Path, broker: Broker, progress: JobProgress
) -> Brought:
    """Write the records of a difference into a table, and delete from it what is gone, if that is asked for.

    Args:
        results: of the whole corpus.
        job: of the difference; None if it is empty.
        output: the list of what is gone is beside it.

    Raises:
        OtherVectors: the job's vectors are of other model files than those that are copied. Nothing was written.
        OutputError, InputError, JobError: as by :func:`deliver` and :func:`delete_all`.
        KeyboardInterrupt: the same command continues.
    """
    delivered = 0
    if job is not None:
        job.wait(progress=progress.running)
        results.check_model()
        with suppress(JobFailed):  # what is done was delivered; the output gets it too, and then the error is raised
            delivered = sink.save(job, broker, progress)
    if results.unchanged and results.status().options.get("keep"):
        progress.say("Kept fields of unchanged texts stay as they are in the table: --force writes all records")
    return Brought(delivered, _delete(sink, results, output, progress) if results.gone else 0)


def _delete(sink: SinkChoice, results: Merged, output: Path, progress: JobProgress) -> int:
    """Delete what is gone, or say that it stays."""
    if not sink.delete_missing:
        what = "1 record is gone and stays" if results.gone == 1 else f"{results.gone:,} records are gone and stay"
        progress.say(f"{what} in the table: --delete-missing deletes what is gone")
        return 0
    status = results.status()
    if status.dim is None:
        raise JobFailed("no record of the corpus has a vector: nothing is deleted, and the output stays as it is")
    gone = _Gone(deleted_beside(output), results.gone)
    deleted = delete_all(sink.sink, target_of(status, status.dim, sink.options), gone.ids())
    progress.say(f"Deleted {deleted:,} records from {sink.url}")
    if gone.nameless:
        progress.say(f"Of what is gone, {gone.nameless:,} had no id, so it can't be deleted")
    return deleted


class _Gone:
    """The list of what is gone.

    Attributes:
        nameless: how many of its records have no id.
    """

    def __init__(self, path: Path, expected: int) -> None:
        self._path, self._expected = path, expected
        self.nameless = 0

    def ids(self) -> Iterator[str]:
        """The ids.

        Raises:
            OutputError: it is not the list that this command wrote.
        """
        from embedctl.changes.gone import read_gone  # here, because most commands compare nothing

        count = 0
        for each in read_gone(self._path):
            count += 1
            if each.id is None:
                self.nameless += 1
            else:
                yield each.id
        if count != self._expected:
            raise OutputError(f"{self._path} was changed meanwhile: start the same command again")
