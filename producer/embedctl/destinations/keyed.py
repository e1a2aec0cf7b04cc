"""Brings a job's vectors to a database, each under its record's id: they stay in Redis, or leave it as the database has
them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from embedctl.destinations.answers import is_of_batch
from embedctl.destinations.draining import Drain
from embedctl.destinations.held import Held, Taken
from embedctl.destinations.ids import LeftOut, decided
from embedctl.destinations.interface import Destination
from embedctl.destinations.loop import Callbacks, Delivered, RefusedRecord, Taker, Written, run
from embedctl.destinations.reader import ResultReader
from embedctl.destinations.released import Released, refuse_database
from embedctl.destinations.rows import Options, Rows
from embedctl.queueing.retrying import TimeLimit
from embedctl.store import BatchFacts, JobStatus
from embedctl.store.drains import batch_name
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import JobDrained, JobError, OutputError, SettingsError
from embedctl_config.outputs import Output, asked_by
from embedctl_config.record_ids import tagged

#: Rows of released batches that a table must still hold when a delivery goes on.
_SAMPLE = 100


def deliver(waiter: Waiter, destination: Destination, options: Options, callbacks: Callbacks) -> Delivered:
    """Bring a job's records to a destination, and wait for those that are not there yet; arguments and errors are those
    of :meth:`Job.deliver`. Failed records are left out. If this dies, the same call resumes. Memory holds a batch."""
    status = waiter.status()
    if is_of_batch(status):
        raise SettingsError(f"job {status.id} was made of a batch file: it is answered in a .jsonl, which -o names")
    destination.refuse_outputs(asked_by(status.options))
    destination.refuse_dtype(options.stored_as)
    if is_released(waiter, status, destination, options):
        return release(waiter, destination, options, callbacks)
    refuse_database(waiter.broker.drains, status.id, waiter.broker.drains.state(status.id))
    reader = ResultReader(waiter)
    left_out = None
    if not options.knows_ids:
        # Only at the job's end, all ids are known.
        records = waiter.until_ended(TimeLimit.from_now(None), callbacks.progress).records
        left_out = decided(reader.heads(callbacks.progress), records, options.duplicates)
    rows = Rows(waiter, destination, options, left_out, callbacks.refused)
    delivery = Delivery(rows, left_out, callbacks.written)
    try:
        run(lambda: reader.chunks(progress=callbacks.progress), delivery, waiter.status)
    finally:
        with suppress(OutputError):  # the delivery has closed it, if it came to its end
            destination.close()
    return delivery.done


class Delivery(Taker[ChunkVectors]):
    def __init__(self, rows: Rows, left_out: LeftOut | None, written: Written) -> None:
        self._rows, self._written = rows, written
        self.done = rows.done
        self.done.left_out = 0 if left_out is None else left_out.count

    def take(self, chunk: ChunkVectors) -> None:
        self.done.failed += len(chunk.errors)
        self._rows.add(chunk)
        if self._rows.is_full:
            self._flush()

    def _flush(self) -> None:
        for chunk in self._rows.flush():
            self._written(chunk)

    def end(self) -> None:
        self._flush()
        self._rows.refuse_missing()

    def close(self) -> None:
        self._rows.close()

    def cut_short(self, error: JobError) -> None:
        """What is done is delivered, also if nothing more comes."""
        self.end()
        self.close()


def is_released(waiter: Waiter, status: JobStatus, destination: Destination, options: Options) -> bool:
    """Whether the results of a job leave Redis as this delivery makes them durable: it was made to be drained, and no
    id of a later record can change what becomes of an earlier one. What has begun so goes on so."""
    if status.drained_to == destination.name:
        return True
    place = waiter.broker.drains.state(status.id)
    if place.parts or place.retry_parts:
        return False
    return status.results_high_water is not None and options.knows_ids


def release(waiter: Waiter, destination: Destination, options: Options, callbacks: Callbacks) -> Delivered:
    """Move a job's results into a database as they arrive, until the job has ended and Redis holds none; arguments and
    errors are those of :meth:`Job.deliver`.

    Counts are those of all calls for this job, and `refused` is called for what earlier ones have found, too.

    Raises JobDrained if the table does not hold any more what has left Redis.
    """
    return _Release(waiter, destination, options, callbacks).drained()


class _Batch(Held):
    """Chunks that are written together. `refused` are the records that the table does not take."""

    def __init__(self, *, of_corpus: bool) -> None:
        super().__init__(of_corpus=of_corpus)
        self.taken: list[ChunkVectors] = []
        self.refused: Sequence[RefusedRecord] = ()

    def add(self, taken: Taken) -> None:
        super().add(taken)
        self.taken.append(taken.vectors)


class _Release(Drain[_Batch]):
    def __init__(self, waiter: Waiter, destination: Destination, options: Options, callbacks: Callbacks) -> None:
        super().__init__(waiter, destination.name, callbacks)
        self._destination, self._options = destination, options
        self._refused: list[RefusedRecord] = []
        self._rows = Rows(waiter, destination, options, None, self._refused.append)
        self._tally = Released()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        try:
            yield
        finally:
            with suppress(OutputError):  # it is closed, if this came to its end
                self._destination.close()

    def _begin(self) -> None:
        dim = self._source.status.dim
        self._tally = Released(self._drains.batches(self._job_id, self._state))
        if self._tally.by_position not in (None, self._options.positions):
            begun = "with" if self._tally.by_position else "without"
            raise SettingsError(f"the delivery of job {self._job_id} was begun {begun} --duplicates position")
        if self._tally.samples and (dim or Output.DENSE not in asked_by(self._source.status.options)):
            self._rows.open({"dim": dim or 0}, self._tally.samples)
            some = random.SystemRandom().sample(self._tally.samples, min(_SAMPLE, len(self._tally.samples)))
            if lacking := self._rows.lacks(some):
                raise JobDrained(
                    f"{self._name} does not hold what was delivered there: of {len(some)} sampled records of job "
                    f"{self._job_id}, {lacking} are missing. They have left Redis: restore the table, or free the job "
                    f"(`embedctl discard {self._job_id}`) and submit its corpus again"
                )
        for each in self._tally.refused.values():
            self._callbacks.refused(each)

    def _begun(self, *, of_corpus: bool) -> _Batch:
        return _Batch(of_corpus=of_corpus)

    def _add(self, held: _Batch, chunk: Taken) -> None:
        held.add(chunk)
        self._rows.add(chunk.vectors)
        if self._rows.is_full:
            self._release()

    def _durable(self, held: _Batch) -> tuple[str, BatchFacts]:
        there = self._rows.done.unchanged
        self._rows.flush()
        held.refused = tuple(self._refused)
        self._refused.clear()
        facts = self._facts(held, self._rows.done.unchanged - there)
        self._tally.add(facts)
        number = self._state.parts if held.of_corpus else self._state.retry_parts + 1
        return batch_name(number, retried=not held.of_corpus), facts

    def _facts(self, held: _Batch, unchanged: int) -> BatchFacts:
        chunks = list(zip(held.chunks, held.taken, strict=True))
        return BatchFacts(
            *held.range,
            rows=[(number, len(chunk.positions) - len(chunk.errors)) for number, chunk in chunks],
            unchanged=unchanged,
            failed=[
                (number, each.position, tagged(each.id), each.code.value, each.message)
                for number, chunk in chunks
                for each in chunk.errors
            ],
            refused=[(each.position, tagged(each.id), each.reason) for each in held.refused],
            retried=[] if held.of_corpus else [(number, chunk.positions.tolist()) for number, chunk in chunks],
            sample=tagged(self._rows.last_id),
            by_position=self._options.positions,
        )

    def _tell(self, held: _Batch) -> None:
        for record in held.refused:
            self._callbacks.refused(record)
        for chunk in held.taken:
            self._callbacks.written(chunk)

    def end(self) -> None:
        self._release()
        self.done.failed = self._source.status.failed
        self._tally.count(self.done)
        self._rows.refuse_missing()

    def close(self) -> None:
        self._rows.close()

    def cut_short(self, error: JobError) -> None:
        """What is done is delivered, also if nothing more comes. Redis knows nothing more of a cancelled job."""
        with suppress(JobError):
            self._release()
        self._rows.close()
