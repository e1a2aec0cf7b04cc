"""`--sync` of a file, and `--cache`: what is known is copied, and a job encodes the rest."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from embedctl.cli.corpora import records_again
from embedctl.cli.job_command import JobCommand
from embedctl.cli.json_forms import job_form, plain
from embedctl.cli.results import exit_status, why_ended
from embedctl.cli.sources import Sources, earlier_of, opened_cache, sources_of
from embedctl.cli.sync import lacking, report_synced, said, submitted, synchronise
from embedctl.corpus.records import Record
from embedctl.destinations.files import fetch
from embedctl.destinations.loop import Delivered
from embedctl.jobs.enqueue import job_spec
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import ExitStatus, JobError, JobNotFound, JobStalled, OutputError
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.printable import printable

if TYPE_CHECKING:
    from embedctl.sync.cache import Cache
    from embedctl.sync.comparison import Difference
    from embedctl.sync.merged import Merged

#: How often a line tells how much is written (seconds).
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update did.

    Attributes:
        unchanged: records whose vectors were copied from the earlier output.
        cached: those whose vectors were in the cache.
        encoded: those that a job was made for.
        status: of all records, in the form of a job's.
        job: its id; None if there was none.
    """

    unchanged: int
    cached: int
    encoded: int
    status: JobStatus
    job: str | None
    done: Delivered


def update(
    broker: Broker,
    command: JobCommand,
    path: Path,
    progress: JobProgress,
    made: Callable[[Job], None],
) -> Updated:
    """Write the vectors of a corpus into a file, which is also the earlier output, and encode only those that are not
    known. `made` is called with the job, if there is one. A KeyboardInterrupt says that the same command resumes. If
    what is known can't be used, nothing is queued. InputError: the corpus can't be read, or changes meanwhile."""
    from embedctl.sync.merged import OtherVectors  # here, because most commands compare nothing

    sync = said(broker, str(path.absolute()), progress) if command.sync.of_file else nullcontext()
    with sync, opened_cache(broker, command) as cache:
        work = _Update(broker, command, path, cache, progress, made)
        try:
            try:
                return work.run(sources_of(broker, command, path, cache, progress.say))
            except OtherVectors as error:
                progress.say(f"{error}: nothing is copied, and all records are encoded")
                return work.run(Sources())
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command resumes where it stopped") from None
        except (JobNotFound, JobStalled):  # nothing is left to free, or the same command resumes
            raise
        except JobError:
            work.discard()
            raise


@dataclass
class _Update:
    _broker: Broker
    _command: JobCommand
    _path: Path
    _cache: Cache | None
    _progress: JobProgress
    _made: Callable[[Job], None]
    _job: Job | None = None

    def __post_init__(self) -> None:
        self._spec = job_spec(self._broker, self._command.choice.options)
        #: The first time, lines that are skipped are listed.
        self._reads = iter((self._command.choice.records,))

    def run(self, sources: Sources) -> Updated:
        """Compare, encode what is lacking, write everything, and add what was encoded to the cache."""
        from embedctl.sync.merged import Merged

        self.discard()
        difference = sources.compared(self._records(), self._progress.say)
        if difference.to_encode:
            self._job = self._submitted(difference)
        else:
            self._progress.say("No text is new or changed: nothing is encoded")
        merged = Merged(difference, sources.known, self._records, self._spec, self._job, sources.about)
        done = self._written(merged, len(difference.found))
        self._say_what_is_trusted(sources, difference)
        if self._job is not None and self._cache is not None:
            self._fill(self._cache, self._job)
        job, status = None if self._job is None else self._job.id, merged.status()
        self.discard()  # its vectors are in the file, and the next command has another difference
        return Updated(*sources.copied(difference), difference.to_encode, status, job, done)

    def discard(self) -> None:
        if self._job is not None:
            with suppress(JobNotFound):
                self._job.discard()
            self._job = None

    def _records(self) -> Iterator[Record]:
        return next(self._reads, partial(records_again, self._command.choice))()

    def _submitted(self, difference: Difference) -> Job:
        """A job with a key of the difference, so that the same command continues it after a crash."""
        decided = {**self._spec.options, "chunk_bytes": None}
        facts = [difference.key, self._spec.model, self._spec.precision, self._spec.max_errors, decided]
        # The class that was chosen must not be another one when the job is made.
        options = dataclasses.replace(self._command.choice.options, hardware=self._spec.hardware)
        lacking = difference.taken_from(self._records())
        job = submitted(self._broker, self._command, self._progress, options, ("changes", facts), lacking)
        self._made(job)
        return job

    def _written(self, merged: Merged, records: int) -> Delivered:
        next_line = time.monotonic() + _LINE_EVERY_S

        def tell(chunk: ChunkVectors) -> None:
            """What is copied shows no other progress."""
            nonlocal next_line
            if time.monotonic() >= next_line and len(chunk.positions):
                next_line = time.monotonic() + _LINE_EVERY_S
                self._progress.say(f"{int(chunk.positions[-1]) + 1:,} of {records:,} records written")

        destination = self._command.destination
        done = fetch(
            merged,
            self._path,
            progress=self._progress.running,
            written=tell,
            refused=self._progress.refused,
            clobber=destination.clobber,
            numbers=destination.numbers,
        )
        if self._job is not None:
            self._job.wait(progress=self._progress.running)
        return done

    def _say_what_is_trusted(self, sources: Sources, difference: Difference) -> None:
        if sources.about is None or sources.confirmed or not difference.unchanged:
            return
        if self._job is None or self._job.status().model_fingerprint is None:
            self._progress.say(
                f"No live worker confirmed that model {self._spec.model} is still the one with fingerprint "
                f"{sources.about.model_fingerprint[:12]}: its vectors were copied on trust"
            )

    def _fill(self, cache: Cache, job: Job) -> None:
        """Put a job's vectors into the cache. They are in a durable file, so an error here costs none of them."""
        status = job.status()
        try:
            cache.add(job.iter_results(), job_fingerprint(status.model_fingerprint or "", status.options))
        except OutputError as error:
            self._progress.say(f"The vectors are written, but not all of them are in the cache: {error}")


def brought_up_to_date(
    broker: Broker, command: JobCommand, progress: JobProgress, made: Callable[[Job], None] = lambda _: None
) -> Callable[[], ExitStatus] | None:
    """Do what `--sync` or `--cache` asks for; `made` is called with each job. Returns what reports it, or None if the
    command writes the vectors of a whole job."""
    if (path := command.updated) is not None:
        updated = update(broker, command, path, progress, made)
        return lambda: report_update(updated, progress, as_json=command.as_json)
    if (database := command.synced) is not None:
        synced = synchronise(broker, command, database, progress, made)
        return lambda: report_synced(synced, database.url, progress, as_json=command.as_json)
    return None


def to_encode(command: JobCommand, broker: Broker | None) -> Iterator[Record]:
    """Of a corpus, the records that a command would encode. Says on stderr how many these are, if it may copy some.
    Without a Redis, only texts are compared, with the earlier output."""
    choice, path = command.choice, command.destination.path

    def say(line: str) -> None:
        click.echo(printable(line), err=True)

    if command.synced is not None:
        return lacking(broker, command, command.synced, say)
    if not command.sync.copies or not isinstance(path, Path):
        return choice.records()
    with opened_cache(broker, command) as cache:
        if broker is None:
            say("Nothing tells which files the model has: only texts are compared, and not with a cache")
            sources = Sources(earlier_of(command, path, say))
        else:
            sources = sources_of(broker, command, path, cache, say)
        difference = sources.compared(choice.records(), say)
    unchanged, cached = sources.copied(difference)
    say(f"{unchanged:,} records are unchanged, {cached:,} are in the cache, {difference.to_encode:,} are to encode")
    return difference.taken_from(records_again(choice))


def report_update(updated: Updated, progress: JobProgress, *, as_json: bool) -> ExitStatus:
    """Say what an update did; returns the exit status of the command."""
    if updated.done.files:
        progress.say("Wrote " + ", ".join(map(str, updated.done.files)))
    progress.say(_sentence(updated), prose=True)
    if as_json:
        facts = {
            **job_form(updated.status),
            "id": updated.job,
            "vectors": updated.status.done,
            "dimensions": updated.status.dim,
            "unchanged": updated.unchanged,
            "cached": updated.cached,
            "encoded": updated.encoded,
            "files": [str(file) for file in updated.done.files],
        }
        click.echo(json.dumps(facts, default=plain))
    return exit_status(updated.status, updated.done.refused)


def _sentence(updated: Updated) -> str:
    status = updated.status
    line = f"{status.done:,} vectors"
    if status.dim:
        line += f" of {status.dim} dimensions"
    line += f": {updated.unchanged:,} unchanged, {updated.cached:,} from the cache, {updated.encoded:,} texts encoded"
    line += f", of which {status.failed:,} failed" if status.failed else ""
    line += f"; {updated.done.refused:,} refused" if updated.done.refused else ""
    if status.stopped_by is not None:
        why = why_ended(status, is_freed=True)
        line += f"; {status.records - status.done - status.failed:,} were not encoded, because {why}"
    return line
