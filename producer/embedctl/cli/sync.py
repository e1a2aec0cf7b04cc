"""`--sync`: a database becomes what a corpus says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import click

from embedctl.cli.corpora import Skipped, records_again
from embedctl.cli.delivery import DatabaseChoice, list_failed
from embedctl.cli.job_command import JobCommand
from embedctl.cli.json_forms import job_form, plain
from embedctl.cli.results import exit_status
from embedctl.corpus.records import Record
from embedctl.destinations.interface import Contract
from embedctl.destinations.loop import Delivered
from embedctl.destinations.right import announced
from embedctl.jobs.enqueue import job_spec
from embedctl.jobs.job import Job
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import model_files
from embedctl.store import JobStatus
from embedctl.sync.comparison import Difference, compare, delete_missing
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import (
    CorpusChanged,
    ExitStatus,
    JobError,
    JobNotFound,
    JobStalled,
    JobUnfinished,
    OtherContract,
    OutputError,
)

#: How often the destination is compared again, because another run has changed it, or has left a job.
_ROUNDS = 5


@dataclass(slots=True)
class Synced:
    """What a run did: with the records of the corpus, and of those that a job was made for, `done`. `deleted` is None
    if nobody asked for that, and `status`, of the last job, if there was none."""

    records: int = 0
    done: Delivered = field(default_factory=Delivered)
    deleted: int | None = None
    status: JobStatus | None = None

    @property
    def unchanged(self) -> int:
        """Records that the database had already."""
        done = self.done
        return self.records - done.written - done.refused - done.failed - done.not_encoded


def synchronise(
    broker: Broker,
    command: JobCommand,
    database: DatabaseChoice,
    progress: JobProgress,
    made: Callable[[Job], None],
) -> Synced:
    """Compare a database with a corpus, encode what it lacks, and delete what is gone, if that is asked for; `made` is
    called with each job. A KeyboardInterrupt says that the same command resumes. JobUnfinished: nothing tells which
    files the model has."""
    with said(broker, database.table.name, progress):
        return _Sync(broker, command, database, progress, made, contract_of(broker, command, database)).run()


@contextmanager
def said(broker: Broker, name: str, progress: JobProgress) -> Iterator[None]:
    """Say whether another sync is writing a destination now. The next one hears of this one."""
    with announced(broker, name) as other:
        if other:
            progress.say(f"Another sync is writing {name} now: {other}")
        yield


@dataclass
class _Sync:
    _broker: Broker
    _command: JobCommand
    _database: DatabaseChoice
    _progress: JobProgress
    _made: Callable[[Job], None]
    _contract: Contract
    _skipped: Skipped = field(default_factory=Skipped)
    _result: Synced = field(default_factory=Synced)

    def run(self) -> Synced:
        try:
            for _ in range(_ROUNDS):
                with self._compared() as difference:
                    if not difference.to_encode or self._brought(difference):
                        self._delete(difference)
                        return self._result
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command resumes where it stopped") from None
        raise OutputError(
            f"{self._database.url} was changed by others {_ROUNDS} times meanwhile: run the command again"
        )

    def _compared(self) -> Difference:
        self._progress.say(f"Comparing the corpus with {self._database.url}")
        self._skipped = Skipped()
        try:
            difference = compare(
                self._database.table,
                self._contract,
                self._command.choice.records(self._skipped),
                deletes=self._command.sync.deletes is not None,
            )
        finally:
            self._database.table.close()
        self._result.records = len(difference.found)
        self._progress.say(f"{difference.unchanged:,} records are unchanged, {difference.to_encode:,} are to encode")
        return difference

    def _brought(self, difference: Difference) -> bool:
        """Encode and write what is lacking; whether that was done, and not something else that has to come first."""
        jobs: list[str] = []
        try:
            job, is_whole = self._submitted(difference, jobs)
            if job is None:
                return False
            self._made(job)
            done = self._database.save(job, self._broker, self._progress)
            list_failed(job, self._progress)
            self._result.status = job.status()
            job.discard()
        except (JobNotFound, JobStalled):  # another run of the same corpus was faster, and has discarded it
            return False
        except (JobError, OtherContract):  # also if another model's worker took it: the next run would find it again
            for each in jobs:
                with suppress(JobNotFound):
                    Job(each, self._broker).discard()
            raise
        # What is refused or failed is lacking still, and counts again if there is another round.
        self._result.done = replace(done, written=done.written + self._result.done.written)
        return is_whole

    def _submitted(self, difference: Difference, jobs: list[str]) -> tuple[Job | None, bool]:
        """A job of what is lacking, and whether it is all of that.

        Its key is one of the whole corpus and the options, so it is found again after a crash. It is written from its
        end on, so it lacks nothing that the destination has only since.
        """
        options = self._command.choice.options
        # With other options, such as those of another version's settings, it would be refused until it expires.
        spec = {**job_spec(self._broker, options).options, "chunk_bytes": None}
        facts = (self._database.url, self._contract.text, difference.digest.hex(), spec)
        records = difference.taken_from(records_again(self._command.choice))
        try:
            return submitted(
                self._broker, self._command, self._progress, options, facts, records, lambda job: jobs.append(job.id)
            ), True
        except CorpusChanged:
            if not jobs:
                raise
        job = Job(jobs[-1], self._broker)
        if job.status().original_chunks is not None:
            self._progress.say(f"Resuming job {job.id}, which an earlier run has made of this corpus")
            return job, False
        job.cancel()  # what it has is no more the beginning of what is lacking
        job.discard()
        return None, False

    def _delete(self, difference: Difference) -> None:
        limit = self._command.sync.deletes
        if limit is None or self._result.done.not_encoded:
            return
        if self._skipped.lines or not len(difference.found):
            raise OutputError(
                f"nothing is deleted from {self._database.url}, because "
                + (
                    f"{self._skipped.lines:,} bad lines of the corpus were skipped"
                    if self._skipped.lines
                    else "the corpus is empty"
                )
            )
        table = self._database.table
        try:
            table.open(self._contract)
            self._result.deleted = delete_missing(table, difference, limit)
        finally:
            table.close()
        self._progress.say(f"Deleted {self._result.deleted:,} rows from {self._database.url}")


def submitted(
    broker: Broker,
    command: JobCommand,
    progress: JobProgress,
    options: SubmitOptions,
    facts: Sequence[Any],
    lacking: Iterator[Record],
    on_job: Callable[[JobStatus], object] = lambda _: None,
) -> Job:
    """A job of the records that are lacking. The same command finds it again by a key, which `facts`, JSON values,
    decide."""
    key = f"sync-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}"
    given = options.idempotency_key
    options = replace(options, idempotency_key=key if given is None else f"{given}-{key}")
    first = next(lacking)  # a corpus that changed is noticed before a job is made
    return command.submit(broker, progress, options, chain([first], lacking), on_job=on_job)


def lacking(
    broker: Broker | None, command: JobCommand, database: DatabaseChoice, say: Callable[[str], None]
) -> Iterator[Record]:
    """Of a corpus, the records that a database lacks; all of them if nothing tells what a job would make."""
    if broker is None:
        say("Nothing tells which files the model has, so nothing is compared")
        return command.choice.records()
    contract, records = contract_of(broker, command, database), command.choice.records()
    try:
        with compare(database.table, contract, records, deletes=False) as difference:
            say(f"{difference.unchanged:,} records are unchanged, {difference.to_encode:,} are to encode")
            return difference.taken_from(records_again(command.choice))
    finally:
        database.table.close()


def contract_of(broker: Broker, command: JobCommand, database: DatabaseChoice) -> Contract:
    """The contract of a job that is to be made, by what live workers say of its model. JobUnfinished: no live worker
    would take it, or they do not agree."""
    spec = job_spec(broker, command.choice.options)
    models = model_files(broker.settings, broker.workers, spec)
    if len(models) != 1:
        raise JobUnfinished(
            f"--sync compares by the files of model {spec.model}, and "
            + ("live workers have different ones" if models else "no live worker of its class tells them")
            + f": start a worker, or set [models.{spec.model}] fingerprint"
        )
    (model,) = models
    return Contract.of(spec, 0, database.options.dtype, model=model)


def report_synced(synced: Synced, url: str, progress: JobProgress, *, as_json: bool) -> ExitStatus:
    """Say what became of the records; returns the exit status of the command."""
    done = synced.done
    line = (
        f"{synced.records:,} records: {synced.unchanged:,} unchanged, {done.written:,} written, {done.failed:,} failed"
    )
    line += f", {done.refused:,} refused" if done.refused else ""
    line += f", {done.not_encoded:,} not encoded" if done.not_encoded else ""
    line += "" if synced.deleted is None else f"; {synced.deleted:,} rows deleted"
    progress.say(line, prose=True)
    if as_json:
        facts = {
            **({} if synced.status is None else job_form(synced.status)),
            "id": None if synced.status is None else synced.status.id,
            "destination": url,
            "records": synced.records,
            "delivered": {**done.counts, "unchanged": synced.unchanged},
            "deleted": synced.deleted,
        }
        click.echo(json.dumps(facts, default=plain))
    if synced.status is None:
        return ExitStatus.SUCCESS
    return exit_status(synced.status, done.refused)
