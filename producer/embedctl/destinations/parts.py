"""Takes a job's results to numbered parts of a folder or a bucket. Only then do they leave Redis."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from embedctl.destinations.draining import Drain
from embedctl.destinations.held import Taken
from embedctl.destinations.interface import Contract
from embedctl.destinations.loop import BeginAgain, Callbacks, Delivered, RefusedRecord
from embedctl.destinations.numbers import CALIBRATED_ON, FLOAT32, Dtype, Numbers, agreed, ranges_of
from embedctl.destinations.parquet import KeptColumns
from embedctl.destinations.part import OpenPart
from embedctl.destinations.part_list import PartList
from embedctl.destinations.place import Place
from embedctl.destinations.right import overtaken
from embedctl.destinations.unfinished import digest_of
from embedctl.destinations.writer import Content
from embedctl.store import PartFacts
from embedctl.waiting.results import Vectors
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import BrokerUnavailable, JobCancelled, JobError, OutputError

log = logging.getLogger(__name__)

#: Fewest vectors that ranges are taken from if Redis holds no more. sentence-transformers warns below that.
_FEWEST = 100


def drain(waiter: Waiter, place: Place, callbacks: Callbacks, *, numbers: Numbers | None = None) -> Delivered:
    """Move a job's results to parts as they arrive, until the job has ended and Redis holds none; arguments and errors
    are those of :meth:`Job.deliver`, but a record is `refused` once it is in a durable part as one that failed."""
    return _Parts(waiter, place, callbacks, numbers).drained()


class _Parts(Drain[OpenPart]):
    def __init__(self, waiter: Waiter, place: Place, callbacks: Callbacks, wanted: Numbers | None) -> None:
        super().__init__(waiter, place.name, callbacks)
        self._place, self._wanted = place, wanted
        self._list = PartList(place, self._drains, self._job_id, lambda: self._state)
        self._told = 0  # chunks of the corpus that the caller knows to be in a part

    @contextmanager
    def _opened(self) -> Iterator[None]:
        try:
            with self._place.locked():
                self._list.check()
                yield
        except BrokerUnavailable:  # also an OSError, but one of Redis
            raise
        except OSError as error:
            raise OutputError(
                f"{self._name} can't be written: {error.strerror or error}. What is not in a part is still in Redis; "
                "the same command resumes"
            ) from error
        finally:
            if self._held is not None:
                self._held.abandon()

    def _begin(self) -> None:
        self._numbers = self._agreed(self._wanted)
        options = self._source.status.options
        self._kept = KeptColumns(options.get("keep", ()), options.get("column_types"))

    def _begun(self, *, of_corpus: bool) -> OpenPart:
        path = self._place.local(self._list.next_name(of_corpus=of_corpus))
        content = Content.of(self._source.status, path, self._numbers, self._about)
        return OpenPart(content, self._kept, of_corpus=of_corpus)

    def _add(self, held: OpenPart, chunk: Taken) -> None:
        try:
            held.add(chunk)
        except BeginAgain:  # its chunks are still in Redis
            self._held = None
            raise
        if not (chunk.of_corpus and chunk.chunk < self._told):
            self._callbacks.written(chunk.vectors)
        self._told = max(self._told, chunk.chunk + 1)
        if held.records >= self._broker.settings.limits.part_records:
            self._release()

    def _durable(self, held: OpenPart) -> tuple[str, PartFacts]:
        name = self._list.next_name(of_corpus=held.of_corpus)
        try:
            held.finish(self._job_id, self._about().fingerprint)
            sha256, size = digest_of(self._place.scratch(name))
            self._publish(name, of_corpus=held.of_corpus)
        except FileNotFoundError:  # another drainer has started the part again
            raise overtaken(self._job_id) from None
        except BaseException:
            held.abandon()
            raise
        return name, PartFacts(sha256, size, *held.range, held.records)

    def _publish(self, name: str, *, of_corpus: bool) -> None:
        try:
            self._place.publish(name)
        except FileExistsError:
            self._state = self._right.take()
            self._list.publish_over(name, of_corpus=of_corpus)

    def _tell(self, held: OpenPart) -> None:
        for each in held.refused:
            self._callbacks.refused(RefusedRecord(each.position, each.id, each.message))

    def end(self) -> None:
        self._release()
        status = self._source.status
        records, refused = self._list.counts(status)
        self.done.failed, self.done.refused = status.failed, refused
        self.done.written = records - status.failed - refused

    def close(self) -> None:
        self.done.files = self._list.sum_up(self._source.status, self._numbers, self._about().fingerprint)

    def cut_short(self, error: JobError) -> None:
        """Redis has no results of a cancelled job; of any other, the same command resumes with what it has."""
        if isinstance(error, JobCancelled):
            with suppress(JobError):
                self._source.status = self._broker.jobs.status(self._job_id)
                self._release()

    def _agreed(self, wanted: Numbers | None) -> Numbers:
        """How all parts store vectors: as the first one does, or, before there is one, as the caller wants it.
        SettingsError: the caller wants something else. OutputError: there are too few vectors for ranges."""
        stored = self._list.numbers()
        if stored is None:
            wanted = wanted or FLOAT32
            needs_ranges = wanted.kind is Dtype.INT8 and wanted.ranges is None
            return Numbers(wanted.kind, self._ranges()) if needs_ranges else wanted
        return agreed(wanted, stored, self._job_id, restores=False)

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

    def _about(self) -> Contract:
        status = self._source.status
        model = status.model_fingerprint or self._broker.jobs.status(self._job_id).model_fingerprint
        return Contract.of(status, model=model)
