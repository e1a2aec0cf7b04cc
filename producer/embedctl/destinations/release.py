"""Delivers a drained job into a database: what is durable there leaves Redis."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress

from embedctl.destinations.held import Held, Taken
from embedctl.destinations.interface import Destination
from embedctl.destinations.loop import Delivered, Refused, RefusedRecord, Taker, Written, run
from embedctl.destinations.released import Tally, refuse_database
from embedctl.destinations.right import DrainRight
from embedctl.destinations.rows import Options, Rows
from embedctl.destinations.unreleased import Interrupted, Unreleased
from embedctl.store import BatchFacts, JobState, JobStatus
from embedctl.store.drains import batch_name
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.waiter import Progress, Waiter, ended_by_budget, refuse_cancelled
from embedctl_config.errors import JobDrained, JobError, JobFailed, OutputError, SettingsError

#: Rows of released batches that a table must still hold when a delivery goes on.
_SAMPLE = 100


def is_released(waiter: Waiter, status: JobStatus, destination: Destination, options: Options) -> bool:
    """Whether the results of a job leave Redis as this delivery makes them durable: it was made to be drained, and no
    id of a later record can change what becomes of an earlier one. What has begun so goes on so."""
    if status.drained_to == destination.name:
        return True
    place = waiter.broker.drains.state(status.id)
    if place.parts or place.retry_parts:
        return False
    return status.results_high_water is not None and options.knows_ids


def release(
    waiter: Waiter,
    destination: Destination,
    options: Options,
    *,
    progress: Progress | None = None,
    written: Written | None = None,
    refused: Refused | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Delivered:
    """Move a job's results into a database as they arrive, until the job has ended and Redis holds none; arguments and
    errors are those of :meth:`Job.deliver`. `stopped` tells whether the caller does not want any more; it is asked
    while this waits, and after each batch.

    Counts are those of all calls for this job, and `refused` is called for what earlier ones have found, too.

    Raises JobDrained if the table does not hold any more what has left Redis.
    """
    try:
        return _Release(waiter, destination, options, progress, written, refused, stopped).released()
    finally:
        with suppress(OutputError):  # it is closed, if this came to its end
            destination.close()


class _Release(Taker[Taken]):
    def __init__(
        self,
        waiter: Waiter,
        destination: Destination,
        options: Options,
        progress: Progress | None,
        written: Written | None,
        refused: Refused | None,
        stopped: Callable[[], bool],
    ) -> None:
        self._waiter, self._name, self._options = waiter, destination.name, options
        self._written, self._refused, self._stopped = written, refused, stopped
        self._job_id, self._broker = waiter.job_id, waiter.broker
        high_water = waiter.ask(waiter.broker.results_high_water)
        self._most_bytes = max(1, high_water // 2)  # the other half is for workers, while a batch is made durable
        self._right = DrainRight(waiter, high_water)
        self._source = Unreleased(waiter, progress, self._check_wanted, self._release)
        self._batch_refused: list[RefusedRecord] = []
        self._rows = Rows(waiter, destination, options, None, self._batch_refused.append)
        self._held: Held | None = None
        self._taken: list[ChunkVectors] = []
        self._tally = Tally()
        self.done = Delivered()

    def released(self) -> Delivered:
        refuse_cancelled(self._source.status)
        state = self._right.take()
        with self._right.kept():
            if state.place != self._name:
                refuse_database(self._broker.drains, self._job_id, state)
            self._state = self._right.take(self._name)
            status = self._source.look()
            self._take_up(status)
            self._broker.drains.unlink_drained(self._job_id, status.chunks)
            run(lambda: self._source.all(self._state.next_chunk), self, lambda: self._source.status)
        ended = self._source.status
        if ended.stopped_by is not None and ended.state is JobState.FAILED:
            raise JobFailed(f"{ended_by_budget(ended)}. What is done is in {self._name}")
        return self.done

    def _take_up(self, status: JobStatus) -> None:
        """Go on after what earlier calls have released; JobDrained if the table has lost that."""
        self._tally = Tally(self._broker.drains.batches(self._job_id, self._state))
        if self._tally.by_position not in (None, self._options.positions):
            begun = "with" if self._tally.by_position else "without"
            raise SettingsError(f"the delivery of job {self._job_id} was begun {begun} --duplicates position")
        if self._tally.samples and status.dim:
            self._rows.open(status.dim)
            some = random.SystemRandom().sample(self._tally.samples, min(_SAMPLE, len(self._tally.samples)))
            if lacking := self._rows.lacks(some):
                raise JobDrained(
                    f"{self._name} does not hold what was delivered there: of {len(some)} sampled records of job "
                    f"{self._job_id}, {lacking} are missing. They have left Redis: restore the table, or free the job "
                    f"(`embedctl discard {self._job_id}`) and submit its corpus again"
                )
        self._tell_refused(self._tally.refused.values())

    def take(self, chunk: Taken) -> None:
        self._check_wanted()
        if self._held is not None and not self._held.has_room_for(chunk, most_bytes=self._most_bytes):
            self._release()
        self._held = self._held or Held(of_corpus=chunk.of_corpus)
        self._held.add(chunk)
        self._taken.append(chunk.vectors)
        self._rows.add(chunk.vectors)
        if self._rows.is_full:
            self._release()

    def _release(self) -> None:
        """Make what is in hand durable, note it, and free its results, in this order."""
        held, self._held = self._held, None
        if held is None:
            return
        there = self._rows.done.unchanged
        self._rows.flush()
        facts = self._facts(held, self._rows.done.unchanged - there)
        of_corpus = held.of_corpus
        number = self._state.parts if of_corpus else self._state.retry_parts + 1
        self._right.release(batch_name(number, retried=not of_corpus), facts, held)
        self._state = self._state.after(held.range)
        self._tally.add(facts)
        self._tell()
        self._check_wanted()

    def _facts(self, held: Held, unchanged: int) -> BatchFacts:
        chunks = list(zip(held.chunks, self._taken, strict=True))
        return BatchFacts(
            *held.range,
            rows=[(number, len(chunk.positions) - len(chunk.errors)) for number, chunk in chunks],
            unchanged=unchanged,
            failed=[
                (number, each.position, each.id, each.code.value, each.message)
                for number, chunk in chunks
                for each in chunk.errors
            ],
            refused=[(each.position, each.id, each.reason) for each in self._batch_refused],
            retried=[] if held.of_corpus else [(number, chunk.positions.tolist()) for number, chunk in chunks],
            sample=self._rows.last_id,
            by_position=self._options.positions,
        )

    def _tell(self) -> None:
        """Tell the caller of what has just been released."""
        self._tell_refused(self._batch_refused)
        if self._written is not None:
            for chunk in self._taken:
                self._written(chunk)
        self._batch_refused.clear()
        self._taken.clear()

    def _tell_refused(self, records: Iterable[RefusedRecord]) -> None:
        if self._refused is not None:
            for each in records:
                self._refused(each)

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

    def _check_wanted(self) -> None:
        if self._stopped():
            raise Interrupted
