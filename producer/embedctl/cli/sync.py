"""`--sync`: a database becomes what a corpus says."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import click

from embedctl.cli.corpora import records_again
from embedctl.cli.delivery import DatabaseChoice, list_failed
from embedctl.cli.job_command import JobCommand
from embedctl.cli.json_forms import job_form, plain
from embedctl.cli.results import exit_status
from embedctl.corpus.records import Record
from embedctl.destinations.interface import Contract
from embedctl.destinations.loop import Delivered
from embedctl.jobs.enqueue import job_spec
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.sync.comparison import Difference, compare, delete_missing
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import (
    CorpusChanged,
    ExitStatus,
    JobDrained,
    JobError,
    JobHeld,
    JobNotFound,
    JobStalled,
    JobUnfinished,
    OtherContract,
    OutputError,
)

#: How often the destination is compared again, because another run has changed it, or has left a job.
_ROUNDS = 5
#: How often it is looked whether another process still delivers a job (seconds).
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """What a command did with the records of a corpus, in words and for JSON, and its exit status."""

    line: str
    facts: Mapping[str, Any]
    status: ExitStatus

    def tell(self, progress: JobProgress, *, as_json: bool) -> ExitStatus:
        progress.say(self.line, prose=True)
        if as_json:
            click.echo(json.dumps(self.facts, default=plain))
        return self.status


@dataclass
class Work:
    """What a command does that encodes only what its destination lacks. `made` is called with each job."""

    broker: Broker
    command: JobCommand
    progress: JobProgress
    made: Callable[[Job], None]

    def submitted(
        self,
        facts: Sequence[Any],
        lacking: Iterator[Record],
        on_job: Callable[[JobStatus], object] = lambda _: None,
        hardware: str | None = None,
    ) -> Job:
        """A job of the records that are lacking, of this class if it was chosen before. The same command finds it again
        by a key, which `facts`, JSON values, decide."""
        key = f"sync-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}"
        options = self.command.choice.options
        if options.idempotency_key is not None:
            key = f"{options.idempotency_key}-{key}"
        options = replace(options, idempotency_key=key, hardware=hardware or options.hardware)
        first = next(lacking)  # a corpus that changed is noticed before a job is made
        return self.command.submit(self.broker, self.progress, options, chain([first], lacking), on_job=on_job)

    def report(
        self, records: int, counts: Mapping[str, int], status: JobStatus | None, facts: Mapping[str, Any]
    ) -> Report:
        """What became of all records, `counts` by what that is; `facts` are for JSON, beside those of a job's status.
        None if no job was needed."""
        tally = self.command.choice.tally
        line = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items() if count)
        left_out = f"; {tally.bad_lines} left out" if tally.lines else ""
        ended = ExitStatus.SUCCESS if status is None else exit_status(status, counts["refused"])
        of_job = {} if status is None else job_form(status)
        return Report(f"{records:,} records: {line}{left_out}", {**of_job, **facts, "bad_lines": tally.lines}, ended)


@dataclass
class Sync(Work):
    """Compares a database with a corpus, encodes what it lacks, and deletes what is gone, if that is asked for."""

    database: DatabaseChoice
    _records: int = 0
    #: Of the records that jobs were made for.
    _done: Delivered = field(default_factory=Delivered)
    _deleted: int | None = None
    #: Of the last job.
    _status: JobStatus | None = None

    def run(self) -> Report:
        """JobUnfinished: nothing tells which files the model has."""
        if not any(self._is_brought_up_to_date() for _ in range(_ROUNDS)):
            raise OutputError(
                f"{self.database.url} was changed by others {_ROUNDS} times meanwhile: run the command again"
            )
        return self._report()

    def lacking(self) -> Iterator[Record]:
        """The records of the corpus that the database lacks. Raises as :meth:`run`."""
        with self._compared(deletes=False) as difference:
            return difference.taken_from(records_again(self.command.choice))

    @cached_property
    def _contract(self) -> Contract:
        options = self.command.choice.options
        if (contract := self.database.contract(self.broker, options)) is not None:
            return contract
        model = options.model or self.broker.settings.model
        raise JobUnfinished(
            f"--sync compares by the files of model {model}, and no live worker of its class tells them, or they have "
            f"different ones: start a worker, or set [models.{model}] fingerprint"
        )

    def _is_brought_up_to_date(self) -> bool:
        """Whether one round was enough."""
        with self._compared(deletes=self.command.sync.deletes is not None) as difference:
            is_enough = not difference.to_encode or self._brought(difference)
            if is_enough:
                self._delete(difference)
            return is_enough

    def _compared(self, *, deletes: bool) -> Difference:
        self.progress.say(f"Comparing the corpus with {self.database.url}")
        with closing(self.database.table) as table:
            difference = compare(table, self._contract, self.command.choice.records(), deletes=deletes)
        self._records = len(difference.found)
        self.progress.say(f"{difference.unchanged:,} records are unchanged, {difference.to_encode:,} are to encode")
        return difference

    def _brought(self, difference: Difference) -> bool:
        """Encode and write what is lacking; whether that was done, and not something else that has to come first."""
        jobs: list[str] = []
        try:
            job, is_whole = self._submitted(difference, jobs)
            self.made(job)
            done = self.command.destination.save(job, self.broker, self.progress)
            list_failed(job, self.progress)
            status = job.status()
            if is_whole or status.stopped_by is None:
                self._status = status
            else:
                done.not_encoded = 0  # the next round finds it
            job.discard()
        except (JobNotFound, JobStalled):  # another run of the same corpus was faster, and has discarded it
            return False
        except JobHeld:  # another run of the same corpus delivers it
            with suppress(JobNotFound):
                self._await_turn(Job(jobs[-1], self.broker))
            return False
        except (JobError, OtherContract) as error:
            # Another model's worker took it, and the next run would find it again; or the table has lost what had left
            # Redis for it, and that is encoded again.
            for each in jobs:
                with suppress(JobNotFound):
                    Job(each, self.broker).discard()
            if not isinstance(error, JobDrained):
                raise
            return False
        # What is refused or failed is lacking still, and counts again if there is another round.
        self._done = replace(done, written=done.written + self._done.written)
        return is_whole

    def _await_turn(self, job: Job) -> None:
        """Wait while another process delivers a job; JobNotFound once it has freed it."""
        while self.broker.drains.is_held(job.id):
            job.status()
            time.sleep(_LOOK_S)

    def _submitted(self, difference: Difference, jobs: list[str]) -> tuple[Job, bool]:
        """A job of what is lacking, and whether it is all of that.

        Its key is one of the whole corpus and the options, so it is found again after a crash. If the destination has
        some of it by then, it is not what is lacking now; what it has is written all the same, and compared again.
        """
        # With other options, such as those of another version's settings, it would be refused until it expires.
        spec = {**job_spec(self.broker, self.command.choice.options).options, "chunk_bytes": None}
        facts = (self.database.url, self._contract.text, difference.digest.hex(), spec)
        records = difference.taken_from(records_again(self.command.choice))
        try:
            return self.submitted(facts, records, lambda job: jobs.append(job.id)), True
        except CorpusChanged:
            if not jobs:
                raise
        job = Job(jobs[-1], self.broker)
        if job.status().original_chunks is not None:
            self.progress.say(f"Resuming job {job.id}, which an earlier run has made of this corpus")
            return job, False
        job.stop()  # what it lacks is no more the end of what is lacking; what it has is written first
        return job, False

    def _delete(self, difference: Difference) -> None:
        limit = self.command.sync.deletes
        if limit is None or self._done.not_encoded:
            return
        tally = self.command.choice.tally
        if tally.lines or not len(difference.found):
            why = f"{tally.bad_lines} left out of the corpus" if tally.lines else "the corpus is empty"
            raise OutputError(f"nothing is deleted from {self.database.url}: {why}")
        with closing(self.database.table) as table:
            table.open(self._contract)
            self._deleted = delete_missing(table, difference, limit)
        self.progress.say(f"Deleted {self._deleted:,} rows from {self.database.url}")

    def _report(self) -> Report:
        done = self._done
        done.unchanged = self._records - done.written - done.refused - done.failed - done.not_encoded
        facts = {
            "id": None if self._status is None else self._status.id,
            "destination": self.database.url,
            "records": self._records,
            "delivered": done.counts,
            "deleted": self._deleted,
        }
        return self.report(self._records, done.counts, self._status, facts)
