"""The asynchronous twins of `enqueue_embeddings` and `Job`: the same code in threads, so that no event loop waits.

A question to Redis runs in one of a few threads that all jobs share. A task that waits holds none: one thread hears the
events of all jobs, so any number of tasks may wait at once. A submission reads its texts, and waits for workers, in a
thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar, cast

from embedctl.broker import Broker
from embedctl.enqueue import JobOptions, Truncation, TruncationSide, parse_budget, submit
from embedctl.job import Job
from embedctl.kept import check_keep
from embedctl.patience import TimeLimit, check_timeout
from embedctl.polling import PollingWaiter, ProgressRelay, eventually, in_own_thread, in_shared_thread
from embedctl.reader import ResultReader
from embedctl.records import Record, RecordLike, records_of
from embedctl.results import ChunkVectors, FailedRecord, Vectors
from embedctl.store import GoneWorker, JobStatus, Suspect, WorkerRow
from embedctl.submission import SubmitProgress
from embedctl_config import tenants
from embedctl_config.errors import JobNotFound
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

if TYPE_CHECKING:
    from embedctl.output.numbers import Numbers

T = TypeVar("T")
U = TypeVar("U")

#: Most texts of an async iterable that are read before the submitting thread takes them.
_AHEAD = 1024
#: How long a cancelled submission may take to free what it has queued (seconds). After that it does so in its thread.
_TIDY_S = 2.0


async def aenqueue_embeddings(
    texts: Iterable[RecordLike] | AsyncIterable[RecordLike],
    *,
    model: str | None = None,
    hardware: str | None = None,
    precision: str | None = None,
    ids: Iterable[str | int | None] | None = None,
    text_field: str = "text",
    id_field: str = "id",
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncation: Truncation = "truncate",
    truncation_side: TruncationSide | None = None,
    normalize: bool = True,
    dimensions: int | None = None,
    chunk_size: int | None = None,
    ttl: float | None = None,
    idempotency_key: str | None = None,
    max_errors: int | str | None = None,
    keep: Sequence[str] = (),
    count_tokens: bool = False,
    unique_ids: bool = False,
    tenant: str | None = None,
    lane: str = tenants.NORMAL,
    digests: bool = False,
    timeout: float | None = None,
    progress: SubmitProgress | None = None,
    settings: Settings | None = None,
) -> AsyncJob:
    """Queue texts for embedding; see :func:`enqueue_embeddings`, whose arguments and errors these are.

    `progress` is called in the event loop, without waiting for it.

    `texts` may also be an async iterable, which is read in the event loop. Any other iterable is read in a thread, as
    are `ids`. Cancelling the task that awaits this also cancels the half-submitted job, unless that has an idempotency
    key: then the same call continues it.
    """
    check_timeout(timeout)
    most, share = parse_budget(max_errors)
    options = JobOptions(
        model=model,
        hardware=hardware,
        precision=precision,
        prompt=prompt,
        prompt_name=prompt_name,
        truncation=truncation,
        truncation_side=truncation_side,
        normalize=normalize,
        dimensions=dimensions,
        chunk_size=chunk_size,
        ttl=ttl,
        idempotency_key=idempotency_key,
        max_errors=most,
        max_errors_share=share,
        keep=check_keep(keep),
        count_tokens=count_tokens,
        tenant=tenant,
        lane=lane,
        digests=digests,
    )
    feed = _Feed(texts) if isinstance(texts, AsyncIterable) else None
    cancelled = threading.Event()

    def work() -> Job:
        chosen = load_settings() if settings is None else settings
        source = cast("Iterable[RecordLike]", texts) if feed is None else feed
        broker = Broker.shared(chosen)
        records = records_of(
            source,
            ids=ids,
            text_field=text_field,
            id_field=id_field,
            keep=options.keep,
            max_bytes=chosen.max_text_bytes,
        )
        if unique_ids:
            from embedctl.unique import checked  # here, because few calls need it

            records = checked(records)
        at_hand = feed is None and isinstance(texts, Sized)
        return submit(broker, _until(cancelled, records), options, report, timeout, at_hand=at_hand)

    loop = asyncio.get_running_loop()

    def report(records: int, waiting_for: str) -> None:
        _check_not(cancelled)
        if progress is not None:
            loop.call_soon_threadsafe(progress, records, waiting_for)

    submitted = in_own_thread(work)
    try:
        return AsyncJob(await asyncio.wrap_future(submitted))
    except asyncio.CancelledError:
        cancelled.set()
        if feed is not None:
            feed.stop()
        ended = asyncio.gather(asyncio.wrap_future(submitted), return_exceptions=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended, _TIDY_S)
        raise
    finally:
        if feed is not None:
            await feed.close()


class AsyncJob:
    """A :class:`Job` whose methods are awaited; :class:`Job` says what they do, take, return and raise.

    Tasks that wait may be cancelled at any time; the job goes on.

    Args:
        job: the same job for callers that block.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._waiter = PollingWaiter(job._waiter)
        self._reader = ResultReader(self._waiter)

    @classmethod
    async def get(cls, job_id: str, settings: Settings | None = None) -> AsyncJob:
        """The job of that id; see :meth:`Job.get`."""
        return cls(await in_shared_thread(partial(Job.get, job_id, settings)))

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an AsyncJob can't be pickled: send its id, and get it there by AsyncJob.get({self.id!r})")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the idle connections of this process; see :meth:`Job.close`."""
        await in_shared_thread(self._job.close)

    @property
    def id(self) -> str:
        """The job's id; it begins with the time of the job's creation, in UTC."""
        return self._job.id

    async def status(self) -> JobStatus:
        """The job's facts at this moment."""
        return await in_shared_thread(self._job.status)

    async def workers(self) -> list[WorkerRow]:
        """The live workers that serve the job's class and model, as they last described themselves."""
        return await in_shared_thread(self._job.workers)

    async def gone_workers(self) -> list[GoneWorker]:
        """The workers of the job's class and model that ended in the last minutes without a farewell."""
        return await in_shared_thread(self._job.gone_workers)

    async def suspects(self) -> list[Suspect]:
        """The chunks that have not ended since one of their owners died, each with its history."""
        return await in_shared_thread(self._job.suspects)

    async def wait(
        self, timeout: float | None = None, progress: Callable[[JobStatus], None] | None = None
    ) -> JobStatus:
        """Wait until the job has ended, and run the reaper meanwhile; see :meth:`Job.wait`.

        `progress` is called in the event loop.
        """
        limit, relay = TimeLimit.from_now(timeout), self._relay(progress)
        look = partial(self._waiter.until_ended, limit, relay, only_end=progress is None)
        return await eventually(self._waiter, look, relay, limit.deadline, only_end=progress is None)

    async def wait_until_sealed(
        self, progress: Callable[[JobStatus], None] | None = None, timeout: float | None = None
    ) -> JobStatus:
        """Wait until the job has all its records; see :meth:`Job.wait_until_sealed`."""
        limit, relay = TimeLimit.from_now(timeout), self._relay(progress)
        return await eventually(self._waiter, partial(self._waiter.until_sealed, limit, relay), relay, limit.deadline)

    def iter_results(
        self,
        *,
        start: int = 0,
        timeout: float | None = None,
        progress: Callable[[JobStatus], None] | None = None,
    ) -> AsyncIterator[ChunkVectors]:
        """The results in input order, chunk by chunk, each as soon as it is there; see :meth:`Job.iter_results`."""
        check_timeout(timeout)
        relay = self._relay(progress)
        return self._each(
            lambda at, since: self._reader.chunks(start + at, timeout, relay, since), relay, timeout=timeout
        )

    async def results(self, timeout: float | None = None) -> list[ChunkVectors]:
        """Wait until the job has ended; all its results in input order; see :meth:`Job.results`."""
        limit, relay = TimeLimit.from_now(timeout), self._relay(None)
        look = partial(self._reader.at_end, limit, relay)
        return await eventually(self._waiter, look, relay, limit.deadline, only_end=True)

    async def drain(
        self,
        place: str | os.PathLike[str],
        progress: Callable[[JobStatus], None] | None = None,
        written: Callable[[ChunkVectors], None] | None = None,
        *,
        output_type: str | None = None,
        ranges: Vectors | None = None,
    ) -> list[str]:
        """Move the results to parts in a folder as they arrive; see :meth:`Job.drain`.

        `progress` and `written` are called in a thread. If the task that awaits this is cancelled, the drain stops
        before its next chunk, and another one continues.
        """
        return await self._in_own_thread(
            progress,
            written,
            lambda progress, written: self._job.drain(place, progress, written, output_type=output_type, ranges=ranges),
        )

    async def deliver(
        self,
        to: str,
        progress: Callable[[JobStatus], None] | None = None,
        written: Callable[[ChunkVectors], None] | None = None,
        *,
        on_duplicate_id: str = "error",
        id: str | None = None,  # noqa: A002  (the flag's name)
        allow_mixed: bool = False,
        output_type: str | None = None,
    ) -> int:
        """Write the records into a table of a database as they arrive; see :meth:`Job.deliver`.

        `progress` and `written` are called in a thread. If the task that awaits this is cancelled, the delivery stops
        before its next chunk, and another one continues.
        """
        return await self._in_own_thread(
            progress,
            written,
            lambda progress, written: self._job.deliver(
                to,
                progress,
                written,
                on_duplicate_id=on_duplicate_id,
                id=id,
                allow_mixed=allow_mixed,
                output_type=output_type,
            ),
        )

    async def _in_own_thread(
        self,
        progress: Callable[[JobStatus], None] | None,
        written: Callable[[ChunkVectors], None] | None,
        run: Callable[[Callable[[JobStatus], None], Callable[[ChunkVectors], None]], T],
    ) -> T:
        """Run what may take long in a thread. If the task is cancelled, it ends at the next call of either function."""
        over = threading.Event()

        def checked(call: Callable[[U], None] | None) -> Callable[[U], None]:
            def checked_call(seen: U) -> None:
                _check_not(over)
                if call is not None:
                    call(seen)

            return checked_call

        try:
            return await asyncio.wrap_future(in_own_thread(partial(run, checked(progress), checked(written))))
        finally:
            over.set()

    async def stored_numbers(self) -> Numbers:
        """How the parts of a drained job store its vectors; see :meth:`Job.stored_numbers`."""
        return await asyncio.wrap_future(in_own_thread(self._job.stored_numbers))

    async def vectors(self) -> Vectors:
        """Every vector: float32, records × dimensions, in input order; see :meth:`Job.vectors`."""
        status, vectors = await in_shared_thread(self._reader.empty_vectors)
        async for _ in self._each(lambda at, _: self._reader.fill(status, vectors, at), ProgressRelay()):
            pass
        return vectors

    async def iter_errors(self) -> AsyncIterator[FailedRecord]:
        """The records of an ended job that have no vector, in input order; see :meth:`Job.iter_errors`."""
        await in_shared_thread(self._reader.ended_status)  # as in Job, a Redis that is away is an error at once
        async for errors in self._each(lambda at, _: self._reader.errors_by_chunk(at), ProgressRelay()):
            for error in errors:
                yield error

    async def errors(self) -> list[FailedRecord]:
        """The records without a vector, in input order; see :meth:`iter_errors`."""
        return [error async for error in self.iter_errors()]

    async def retry_failed(self, timeout: float | None = None) -> int:
        """Queue the failed records again; returns how many they are. See :meth:`Job.retry_failed`."""
        self._waiter.forget()
        # It waits for a Redis that is away, which would block a shared thread.
        return await asyncio.wrap_future(in_own_thread(partial(self._job.retry_failed, timeout)))

    async def stop(self) -> JobStatus:
        """End the job now, and keep what is done; see :meth:`Job.stop`."""
        return await in_shared_thread(self._job.stop)

    async def cancel(self) -> JobStatus:
        """End the job now; see :meth:`Job.cancel`."""
        self._waiter.forget()
        return await in_shared_thread(self._job.cancel)

    async def discard(self) -> None:
        """Free the job and everything stored for it, now."""
        ended = self._waiter.ended_lately()
        self._waiter.forget()
        await in_shared_thread(partial(self._job._discard, ended))

    def _relay(self, progress: Callable[[JobStatus], None] | None) -> ProgressRelay:
        """Passes statuses to `progress`; without that, a missing worker is logged."""
        return ProgressRelay(progress or self._waiter.warn_of_missing_worker, is_asked=progress is not None)

    async def _each(
        self, begin: Callable[[int, float], Iterator[T]], relay: ProgressRelay, *, timeout: float | None = None
    ) -> AsyncIterator[T]:
        """The items of an iterator that reads with this job's waiter.

        Args:
            begin: makes the iterator, given how many items to leave out, and since when (monotonic clock) the next
                one is waited for. An iterator is over once it has raised, even NotYet; another one continues.
            timeout: most seconds between two items.
        """
        items: Iterator[T] | None = None
        given, since = 0, time.monotonic()

        def look() -> T | _End:
            nonlocal items
            if items is None:
                items = begin(given, since)
            try:
                return next(items, _End.END)
            except BaseException:
                items = None
                raise

        while True:
            item = await eventually(self._waiter, look, relay, TimeLimit(timeout, since).deadline)
            if isinstance(item, _End):
                return
            yield item
            given, since = given + 1, time.monotonic()


async def discard_all(jobs: Sequence[AsyncJob]) -> None:
    """Free jobs of one Redis, as :meth:`AsyncJob.discard`; some may be gone. Small ones whose end was awaited within
    the last second take a common round trip."""
    ended = [status for job in jobs if (status := job._waiter.ended_lately()) is not None]

    def discard() -> None:
        removed = jobs[0]._job._broker.upkeep.remove_whole(ended)
        for job in jobs:
            if job.id not in removed:
                with suppress(JobNotFound):  # somebody else has freed it
                    job._job._discard(None)

    for job in jobs:
        job._waiter.forget()
    if jobs:
        await in_shared_thread(discard)


class _End(Enum):
    """What comes after the last item; an item may be anything else, None included."""

    END = auto()


class _Feed:
    """The texts of an async iterable, for a thread to iterate over. Reads them in the event loop that makes this."""

    def __init__(self, texts: AsyncIterable[RecordLike]) -> None:
        self._texts = texts
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Queue[RecordLike | _End] = asyncio.Queue()
        self._room = asyncio.Semaphore(_AHEAD)
        self._reading = asyncio.create_task(self._read_ahead())
        # A callback, because a task that is cancelled before its first step runs none of its code.
        self._reading.add_done_callback(lambda _: self._read.put_nowait(_End.END))

    def __iter__(self) -> Iterator[RecordLike]:
        while batch := asyncio.run_coroutine_threadsafe(self._take(), self._loop).result():
            yield from batch

    def stop(self) -> None:
        """Read no more; a thread that asks for more gets CancelledError."""
        self._reading.cancel()

    async def close(self) -> None:
        """Stop, and see that it has."""
        self.stop()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read_ahead(self) -> None:
        async for text in self._texts:
            self._read.put_nowait(text)
            await self._room.acquire()

    async def _take(self) -> list[RecordLike]:
        """The texts that were read, at least one; none at the end. Raises the error that ended the iterable, if any."""
        texts: list[RecordLike] = []
        while not texts or not self._read.empty():
            text = await self._read.get()
            if isinstance(text, _End):
                self._read.put_nowait(text)  # for the next call
                if not texts:
                    await self._reading
                return texts
            texts.append(text)
            self._room.release()
        return texts


def _until(cancelled: threading.Event, records: Iterable[Record]) -> Iterator[Record]:
    for record in records:
        _check_not(cancelled)
        yield record


def _check_not(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise asyncio.CancelledError
