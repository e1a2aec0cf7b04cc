"""The results of a job that are in Redis and in no part, as its workers finish them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

from embedctl.destinations.held import Taken
from embedctl.destinations.reader import check_fingerprint
from embedctl.destinations.right import overtaken
from embedctl.queueing.retrying import TimeLimit
from embedctl.store import JobStatus
from embedctl.waiting.results import ChunkVectors, chunk_vectors, overlaid
from embedctl.waiting.waiter import Progress, Waiter, lost_chunks, refuse_cancelled
from embedctl_config import wire

#: Chunks that may be missing among the first ones, of a job that does not go on by itself.
_MOST_MISSING = 10_000
#: In place of a result whose records another chunk holds.
_VOID = b"void"


class Unreleased:
    """Reads the results of one job that no part holds. `status` is the job's, of the last look. It calls `check` while
    it waits, whose error ends the wait; and `release`, which makes what was read leave Redis, when workers wait for
    that, and before a look for more."""

    def __init__(
        self, waiter: Waiter, progress: Progress | None, check: Callable[[], None], release: Callable[[], None]
    ) -> None:
        self._waiter, self._progress, self._check, self._release = waiter, progress, check, release
        self._job_id, self._broker = waiter.job_id, waiter.broker
        self.status = self.look()

    def look(self) -> JobStatus:
        self.status = self._waiter.look(self._progress, None)
        return self.status

    def all(self, first: int) -> Iterator[Taken]:
        """All that no part holds, until the job has ended: the chunks of the corpus in order, beginning with this one,
        and then those that retried or repaired records, or were done of a stopped job behind a gap. Raises as
        :meth:`Job.iter_results`, and JobHeld if another process has drained some."""
        yield from self._corpus(first)
        while True:
            self._release()
            self.status = self._waiter.until(self._may_read_rest, TimeLimit.from_now(None), self._progress)
            self._check()
            found, laid_over = False, set[int]()
            for chunk in self._broker.drains.chunks(self._job_id, self.status.chunks, drained=False):
                if chunk in laid_over:
                    continue
                taken = self._taken(chunk, of_corpus=False)
                if taken is not None:
                    found = True
                    laid_over.update(taken.more)
                    yield taken
                elif self.status.state.ended and self.status.stopped_by is None and not self._has_result(chunk):
                    self.raise_lost(chunk)
            if not found and self.status.state.ended:
                return

    def first(self) -> Iterator[ChunkVectors]:
        """The first chunks, as far as the job makes them without anybody taking some away."""
        index, missing, held_back = 0, 0, False
        while missing < _MOST_MISSING and ((known := self.status.original_chunks) is None or index < known):
            taken = self._taken(index)
            if taken is not None:
                yield taken.vectors
            elif self.status.stopped_by is None and not held_back:
                self._wait_for(index, or_held_back=True)
                held_back = self.is_held_back()
                continue
            else:
                missing += 1
            index += 1

    def is_held_back(self) -> bool:
        """Whether no more results may come before some leave Redis."""
        status = self.status
        return not status.state.ended and (status.waits_for_reader or self._waiter.ask(self._broker.connection.is_full))

    def raise_lost(self, chunk: int) -> NoReturn:
        """Say why an ended job has no result of a chunk."""
        raise overtaken(self._job_id) if self._is_drained(chunk) else lost_chunks(self._job_id, chunk, chunk)

    def _corpus(self, index: int) -> Iterator[Taken]:
        while (known := self.status.original_chunks) is None or index < known:
            taken = self._taken(index)
            if taken is not None:
                yield taken
                self.status = self._waiter.look_again(self.status, self._progress)
            elif not self._is_drained(index):  # as it is in a job that was continued after a stop
                if self.status.stopped_by is not None:
                    return
                self._wait_for(index)
                continue
            index += 1

    def _taken(self, index: int, *, of_corpus: bool = True) -> Taken | None:
        return self._waiter.ask(partial(self._read, index, of_corpus))

    def _read(self, index: int, of_corpus: bool) -> Taken | None:
        """The result of a chunk, with those of its retried records that are there; None if there is no result."""
        jobs = self._broker.jobs
        data = jobs.result(self._job_id, index)
        if data is None or data == _VOID:
            return None
        result = wire.decode_result(data)
        check_fingerprint(self._waiter, self.status, index, result)
        chunk, size, more, at = chunk_vectors(result), len(data), [], index
        while chunk.errors and (later := jobs.retried_as(self._job_id, at)) is not None:
            again = jobs.result(self._job_id, later)
            if again is None or again == _VOID:  # not done yet: a part of retried records will hold it
                break
            chunk = overlaid(chunk, chunk_vectors(wire.decode_result(again)))
            size += len(again)
            more.append(later)
            at = later
        return Taken(index, of_corpus, chunk, tuple(more), size, result.digest, result.backend)

    def _wait_for(self, index: int, *, or_held_back: bool = False) -> None:
        """Wait until a chunk's result is there, the corpus turns out to have no such chunk, or, if asked for, the job
        is held back."""

        def is_there(status: JobStatus) -> bool:
            self.status = status
            self._check()
            refuse_cancelled(status)
            if status.original_chunks is not None and index >= status.original_chunks:
                return True
            if self._has_result(index) or status.stopped_by is not None:  # what is there, is there
                return True
            if status.state.ended:
                self.raise_lost(index)
            if status.waits_for_reader:
                self._release()  # a part smaller than others, but workers wait for room
            return or_held_back and self.is_held_back()

        self._waiter.until(is_there, TimeLimit.from_now(None), self._progress)

    def _may_read_rest(self, status: JobStatus) -> bool:
        self._check()
        refuse_cancelled(status)
        return status.state.ended or status.waits_for_reader

    def _has_result(self, chunk: int) -> bool:
        return self._waiter.ask(partial(self._broker.jobs.has_result, self._job_id, chunk))

    def _is_drained(self, chunk: int) -> bool:
        return self._waiter.ask(partial(self._broker.drains.is_drained, self._job_id, chunk))
