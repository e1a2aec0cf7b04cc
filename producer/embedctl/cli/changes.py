"""Updating a file: what is known is copied, and the rest is encoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from embedctl.broker import Broker
from embedctl.cli.corpora import records_again
from embedctl.cli.delivery import DatabaseChoice
from embedctl.cli.job_command import JobCommand
from embedctl.destinations.files import fetch
from embedctl.job import Job
from embedctl.job_options import SubmitOptions
from embedctl.records import Record
from embedctl.results import ChunkVectors
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import JobError, JobNotFound, JobStalled
from embedctl_config.printable import printable

if TYPE_CHECKING:
    from embedctl.changes.merged import Merged
    from embedctl.changes.update import Outcome

#: How often a line tells how much is written (seconds).
_LINE_EVERY_S = 10.0


def update(
    broker: Broker,
    command: JobCommand,
    path: Path,
    progress: JobProgress,
    made: Callable[[Job], None] = lambda _: None,
) -> Outcome:
    """Write the vectors of a corpus into a file, and encode only those that are not known.

    Args:
        made: called with the job, if there is one.

    Raises:
        KeyboardInterrupt: says that the same command continues.
    """
    from embedctl.changes.update import Update  # here, because most commands compare nothing

    choice, destination = command.choice, command.destination
    jobs: list[Job] = []
    reads = iter((choice.records,))

    def records() -> Iterator[Record]:
        """The first time, lines that are skipped are listed."""
        return next(reads, partial(records_again, choice))()

    def submitted(some: Iterator[Record], options: SubmitOptions) -> Job:
        first = next(some)  # there is one, and a corpus that changed is noticed before a job is made
        job = command.submit(broker, progress, options, chain([first], some))
        jobs.append(job)
        made(job)
        return job

    def write(results: Merged) -> list[Path]:
        if not jobs:
            progress.say("No text is new or changed: nothing is encoded")
        tells = _Tells(progress.say, results.status().records)
        found = fetch(
            results,
            path,
            progress=progress.running,
            written=tells,
            refused=progress.refused,
            clobber=destination.clobber,
            numbers=destination.numbers,
        )
        for job in jobs[-1:]:
            job.wait(progress=progress.running)
        return [Path(file) for file in found.files]

    try:
        work = Update(broker, choice.options, records, path, command.asked.sources, destination.numbers, progress.say)
        outcome = work.run(submitted, write)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues where it stopped") from None
    except (JobNotFound, JobStalled):  # nothing is left to free, or the same command continues
        raise
    except JobError:
        for job in jobs[-1:]:
            with suppress(JobNotFound):
                job.discard()
        raise
    for job in jobs[-1:]:
        job.discard()  # its vectors are in the file, and the next command has another difference
    return outcome


class _Tells:
    """Says now and then how much is written: what is copied shows no other progress."""

    def __init__(self, say: Callable[[str], None], records: int) -> None:
        self._say, self._records = say, records
        self._next = time.monotonic() + _LINE_EVERY_S

    def __call__(self, chunk: ChunkVectors) -> None:
        if time.monotonic() >= self._next and len(chunk.positions):
            self._next = time.monotonic() + _LINE_EVERY_S
            self._say(f"{int(chunk.positions[-1]) + 1:,} of {self._records:,} records written")


def to_encode(command: JobCommand, broker: Broker | None) -> Iterator[Record]:
    """Of a corpus, the records that a command would encode. Says on stderr how many these are, if it may copy some.

    Args:
        broker: None if there is no Redis; then only texts are compared, with the earlier output.
    """
    choice, sources, path = command.choice, command.asked.sources, command.destination.path
    if command.sync.is_asked and command.destination.database is not None:
        return _lacking(command, command.destination.database, broker)
    numbers = command.destination.numbers
    if not command.asked.copies or not isinstance(path, Path):
        return choice.records()
    from embedctl.changes.update import Update, texts_alone  # here, because most commands compare nothing

    def say(line: str) -> None:
        click.echo(printable(line), err=True)

    if broker is None:
        plan = texts_alone(choice.records, sources, numbers, path)
        say("Nothing tells which files the model has: only texts are compared, and not with a cache")
    else:
        plan = Update(broker, choice.options, choice.records, path, sources, numbers, say).plan()
    say(f"{plan.unchanged:,} records are unchanged, {plan.cached:,} are in the cache, {plan.to_encode:,} are to encode")
    return plan.difference(records_again(choice))


def _lacking(command: JobCommand, database: DatabaseChoice, broker: Broker | None) -> Iterator[Record]:
    """Of a corpus, the records that a database lacks; all of them if nothing tells what a job would make."""
    from embedctl.cli.sync import contract_of  # here, because most commands compare nothing
    from embedctl.destinations.sync import compare

    if broker is None:
        click.echo("Nothing tells which files the model has, so nothing is compared", err=True)
        return command.choice.records()
    with compare(database.table, contract_of(broker, command, database), command.choice.records()) as difference:
        database.table.close()
        click.echo(f"{difference.unchanged:,} records are unchanged, {difference.to_encode:,} are to encode", err=True)
        return difference.taken_from(records_again(command.choice))
