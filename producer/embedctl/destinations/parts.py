"""Takes a job's results to numbered parts of a folder or a bucket. Only then do they leave Redis."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from embedctl.destinations.held import Taken
from embedctl.destinations.interface import Contract
from embedctl.destinations.loop import BeginAgain, Delivered, Refused, RefusedRecord, Taker, Written, run
from embedctl.destinations.numbers import CALIBRATED_ON, FLOAT32, Numbers, OutputType, ranges_of
from embedctl.destinations.parquet import KeptColumns
from embedctl.destinations.part import OpenPart
from embedctl.destinations.part_list import PartList
from embedctl.destinations.place import Place
from embedctl.destinations.released import refuse_database
from embedctl.destinations.right import DrainRight, overtaken
from embedctl.destinations.unfinished import digest_of
from embedctl.destinations.unreleased import Interrupted, Unreleased
from embedctl.destinations.writer import Content
from embedctl.store import JobState, PartFacts
from embedctl.waiting.results import Vectors
from embedctl.waiting.waiter import Progress, Waiter, ended_by_budget, refuse_cancelled
from embedctl_config.errors import BrokerUnavailable, JobCancelled, JobError, JobFailed, OutputError

log = logging.getLogger(__name__)

#: Fewest vectors that ranges are taken from if Redis holds no more. sentence-transformers warns below that.
_FEWEST = 100


def drain(
    waiter: Waiter,
    place: Place,
    *,
    progress: Progress | None = None,
    written: Written | None = None,
    refused: Refused | None = None,
    stopped: Callable[[], bool] = lambda: False,
    numbers: Numbers | None = None,
) -> Delivered:
    """Move a job's results to parts as they arrive, until the job has ended and Redis holds none; arguments and errors
    are those of :meth:`Job.deliver`, but a record is `refused` once it is in a durable part as one that failed.
    `stopped` tells whether the caller does not want any more; it is asked while the drain waits, and after each
    part."""
    try:
        return _Parts(waiter, place, progress, written, refused, stopped).drained(numbers)
    except BrokerUnavailable:  # also an OSError, but one of Redis
        raise
    except OSError as error:
        raise OutputError(
            f"{place.name} can't be written: {error.strerror or error}. What is not in a part is still in Redis; the "
            "same command resumes"
        ) from error


class _Parts(Taker[Taken]):
    def __init__(
        self,
        waiter: Waiter,
        place: Place,
        progress: Progress | None,
        written: Written | None,
        refused: Refused | None,
        stopped: Callable[[], bool],
    ) -> None:
        self._waiter, self._place, self._stopped = waiter, place, stopped
        self._written, self._refused = written, refused
        self._job_id, self._broker = waiter.job_id, waiter.broker
        self._drains = waiter.broker.drains
        self._high_water = waiter.ask(waiter.broker.results_high_water)
        self._right = DrainRight(waiter, self._high_water)
        self._source = Unreleased(waiter, progress, self._check_wanted, self._finish_part)
        self._part: OpenPart | None = None
        self._told = 0  # chunks of the corpus that the caller knows to be in a part
        self.done = Delivered()

    def drained(self, wanted: Numbers | None) -> Delivered:
        refuse_cancelled(self._source.status)
        refuse_database(self._drains, self._job_id, self._drains.state(self._job_id))
        state = self._right.take()
        with self._right.kept(), self._place.locked():
            self._list = PartList(self._place, self._drains, self._job_id, state)
            self._list.check()
            self._list.state = self._right.take(self._place.name)
            status = self._source.look()
            self._drains.unlink_drained(self._job_id, status.chunks)
            self._numbers = self._agreed(wanted)
            self._kept = KeptColumns(status.options.get("keep", ()))
            try:
                run(lambda: self._source.all(self._list.state.next_chunk), self, lambda: self._source.status)
            finally:
                if self._part is not None:
                    self._part.abandon()
        ended = self._source.status
        if ended.stopped_by is not None and ended.state is JobState.FAILED:
            raise JobFailed(f"{ended_by_budget(ended)}. What is done is in {self._place.name}")
        return self.done

    def take(self, chunk: Taken) -> None:
        self._check_wanted()
        most = max(1, self._high_water // 2)  # the other half is for workers, while this one is made durable
        if self._part is not None and not self._part.has_room_for(chunk, most_bytes=most):
            self._finish_part()
        self._part = self._part or self._begun(of_corpus=chunk.of_corpus)
        vectors, refused = self._numbers.fitting(chunk.vectors)
        try:
            self._part.add(replace(chunk, vectors=vectors), refused)
        except BeginAgain:  # its chunks are still in Redis
            self._part = None
            raise
        if self._written is not None and not (chunk.of_corpus and chunk.chunk < self._told):
            self._written(chunk.vectors)
        self._told = max(self._told, chunk.chunk + 1)
        if self._part.records >= self._broker.settings.limits.part_records:
            self._finish_part()

    def end(self) -> None:
        self._finish_part()
        status = self._source.status
        self.done.failed, self.done.refused = status.failed, self._list.refused(self._numbers)
        self.done.written = self._list.records(status) - status.failed - self.done.refused

    def close(self) -> None:
        self.done.files = self._list.sum_up(self._source.status, self._numbers, self._about().fingerprint)

    def cut_short(self, error: JobError) -> None:
        """Redis has no results of a cancelled job; of any other, the same command resumes with what it has."""
        if isinstance(error, JobCancelled):
            with suppress(JobError):
                self._source.status = self._broker.jobs.status(self._job_id)
                self._finish_part()

    def _check_wanted(self) -> None:
        if self._stopped():
            raise Interrupted

    def _agreed(self, wanted: Numbers | None) -> Numbers:
        """How all parts store vectors: as the first one does, or, before there is one, as the caller wants it.
        OutputError: the caller wants something else, or there are too few vectors for ranges."""
        stored = self._list.numbers()
        if stored is None:
            wanted = wanted or FLOAT32
            needs_ranges = wanted.kind is OutputType.INT8 and wanted.ranges is None
            return Numbers(wanted.kind, self._ranges()) if needs_ranges else wanted
        there = f"{self._place.name} holds parts of job {self._job_id}"
        if wanted is not None and wanted.kind is not stored.kind:
            raise OutputError(
                f"{there} in {stored.kind}, and all its parts have one type: omit the output type {wanted.kind}"
            )
        if wanted is not None and wanted.ranges is not None and not wanted.has_ranges_of(stored):
            raise OutputError(f"{there} with other ranges, and all its parts have the same ones: omit the ranges")
        return stored

    def _ranges(self) -> Vectors:
        """The ranges of the first records. The first part fixes them for all drains to come."""
        ranges, seen = ranges_of(self._source.first(), f"job {self._job_id}")
        self._source.look()
        if seen < CALIBRATED_ON and self._source.is_held_back():
            if seen < _FEWEST:
                raise OutputError(
                    f"job {self._job_id}: int8 needs the range of each component, and Redis holds only {seen} records "
                    f"with a vector at once ({self._high_water} bytes): give a file with --ranges, or raise "
                    "Redis' maxmemory"
                )
            log.warning(
                "job %s: the ranges of int8 are those of %d records, because Redis holds no more", self._job_id, seen
            )
        return ranges

    def _begun(self, *, of_corpus: bool) -> OpenPart:
        path = self._place.local(self._list.next_name(of_corpus=of_corpus))
        content = Content.of(self._source.status, path, self._numbers, self._about)
        return OpenPart(content, self._kept, of_corpus=of_corpus)

    def _finish_part(self) -> None:
        """Make the open part durable, note it, and free its results, in this order."""
        part, self._part = self._part, None
        if part is None or not part.held.chunks:
            return
        held = part.held
        name = self._list.next_name(of_corpus=held.of_corpus)
        try:
            part.finish(self._job_id, self._about().fingerprint)
            sha256, size = digest_of(self._place.scratch(name))
            self._publish(name, of_corpus=held.of_corpus)
        except FileNotFoundError:  # another drainer has started the part again
            raise overtaken(self._job_id) from None
        except BaseException:
            part.abandon()
            raise
        self._right.release(name, PartFacts(sha256, size, *held.range, part.records), held)
        self._list.state = self._list.state.after(held.range)
        if self._refused is not None:
            for each in part.refused:
                self._refused(RefusedRecord(each.position, each.id, each.message))
        self._check_wanted()

    def _publish(self, name: str, *, of_corpus: bool) -> None:
        try:
            self._place.publish(name)
        except FileExistsError:
            self._list.state = self._right.take()
            self._list.publish_over(name, of_corpus=of_corpus)

    def _about(self) -> Contract:
        status = self._source.status
        model = status.model_fingerprint or self._broker.jobs.status(self._job_id).model_fingerprint
        return Contract.of(status, model=model)
