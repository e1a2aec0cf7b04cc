"""The asynchronous twins of `enqueue_embeddings` and `Job`: the same code in threads, so that no event loop waits.

A question to Redis runs in one of a few threads that all jobs share. A task that waits holds none: one thread hears the
events of all jobs, so any number of tasks may wait at once. A few that wait for the results of a small job have threads
of their own, because each hand-over between threads takes time. A submission reads its texts, and waits for workers, in
a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum, auto
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, Unpack

from embedctl.corpus.records import Record, RecordLike
from embedctl.corpus.rows import Rows, records_of
from embedctl.corpus.template import parse_template
from embedctl.jobs.enqueue import as_asked, submit
from embedctl.jobs.job import Job
from embedctl.jobs.options import JobOptions, SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import if_few_wait, in_own_thread, in_shared_thread
from embedctl.queueing.retrying import TimeLimit, check_timeout
from embedctl.store import JobStatus
from embedctl.store.scripts import ScriptCall
from embedctl.waiting.results import (
    ChunkVectors,
    FailedRecord,
    MultiRecord,
    SparseRecord,
    Vectors,
    multi_records,
    sparse_records,
)
from embedctl.waiting.submission import SubmitProgress
from embedctl.waiting.waiter import Progress, Relay
from embedctl_config.errors import JobNotFound
from embedctl_config.loading import load_settings
from embedctl_config.record_ids import RecordId
from embedctl_config.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

#: Most texts of an async iterable that are read before the submitting thread takes them.
_AHEAD = 1024
#: How long a cancelled submission may take to free what it has queued (seconds). After that it does so in its thread.
_TIDY_S = 2.0


async def aenqueue_embeddings(
    texts: Iterable[RecordLike] | AsyncIterable[RecordLike],
    *,
    ids: Iterable[RecordId | None] | None = None,
    text_field: str = "text",
    id_field: str = "id",
    template: str | None = None,
    timeout: float | None = None,
    progress: SubmitProgress | None = None,
    settings: Settings | None = None,
    **options: Unpack[JobOptions],
) -> AsyncJob:
    """Queue texts for embedding; see :func:`enqueue_embeddings`, whose arguments and errors these are.

    `progress` is called in the event loop, without waiting for it.

    `texts` may also be an async iterable, which is read in the event loop. Any other iterable is read in a thread, as
    are `ids`. Cancelling the task that awaits this also cancels the half-submitted job, unless that has an idempotency
    key: then the same call resumes it.
    """
    check_timeout(timeout)
    chosen, made = SubmitOptions.of(**options), parse_template(template)
    source = _Feed(texts) if isinstance(texts, AsyncIterable) else texts
    cancelled = threading.Event()

    def work() -> Job:
        broker = Broker.shared(load_settings() if settings is None else settings)
        rows = Rows(broker.settings.max_text_bytes, text_field, id_field, chosen.corpus_keep, made)
        records = as_asked(records_of(source, rows, ids), rows, chosen, broker.settings)
        return submit(broker, _until(cancelled, records), chosen, report, timeout, at_hand=isinstance(source, Sized))

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
        if isinstance(source, _Feed):
            source.stop()
        await _tidied(submitted)
        raise
    finally:
        if isinstance(source, _Feed):
            await source.close()


async def _tidied(submitted: Future[Job]) -> None:
    """Let a cancelled submission free what it has queued."""
    ended = asyncio.gather(asyncio.wrap_future(submitted), return_exceptions=True)
    with suppress(TimeoutError):
        await asyncio.wait_for(ended, _TIDY_S)


def _describe(call: Callable[..., object], method: Callable[..., object]) -> None:
    """Give a function the name, the parameters and the docstring of a method of :class:`Job`."""
    update_wrapper(call, method)
    call.__signature__ = signature(method)  # type: ignore[attr-defined]  # what inspect reads
    del call.__wrapped__  # type: ignore[attr-defined]  # the method is not awaited, and its twin is


def _asked(
    method: Callable[Concatenate[Job, P], T],
) -> Callable[Concatenate[AsyncJob, P], Coroutine[Any, Any, T]]:
    """The twin of a method that takes one round trip or a few, and waits for nothing."""

    async def call(self: AsyncJob, /, *args: P.args, **options: P.kwargs) -> T:
        return await in_shared_thread(partial(method, self._job, *args, **options))

    _describe(call, method)
    return call


def _run(
    method: Callable[Concatenate[Job, P], T],
) -> Callable[Concatenate[AsyncJob, P], Coroutine[Any, Any, T]]:
    """The twin of a method that may take long. `progress` and `written`, if it has them, are called in its thread; if
    the task is cancelled, it ends at the next call of either."""
    parameters = signature(method)
    told = [name for name in ("progress", "written") if name in parameters.parameters]

    async def call(self: AsyncJob, /, *args: P.args, **options: P.kwargs) -> T:
        over = threading.Event()
        bound = parameters.bind(self._job, *args, **options)
        for name in told:
            bound.arguments[name] = _checked(over, bound.arguments.get(name))
        try:
            return await asyncio.wrap_future(in_own_thread(partial(method, *bound.args, **bound.kwargs)))
        finally:
            over.set()

    _describe(call, method)
    return call


class AsyncJob:
    """A :class:`Job` whose methods are awaited; :class:`Job` says what they do, take, return and raise.

    `progress` is called in the event loop. :meth:`deliver` calls it, and `written`, in a thread; if the task that
    awaits it is cancelled, it stops before its next chunk, and another call resumes. Other tasks that wait may be
    cancelled at any time; the job goes on.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._waiter = job._waiter
        self._reader = job._reader

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

    @property
    def id(self) -> str:
        """The job's id; see :attr:`Job.id`."""
        return self._job.id

    close = _asked(Job.close)
    status = _asked(Job.status)
    workers = _asked(Job.workers)
    gone_workers = _asked(Job.gone_workers)
    suspects = _asked(Job.suspects)
    stop = _asked(Job.stop)
    cancel = _asked(Job.cancel)
    discard = _asked(Job.discard)
    deliver = _run(Job.deliver)
    stored_numbers = _run(Job.stored_numbers)
    retry_failed = _run(Job.retry_failed)

    async def wait(
        self, timeout: float | None = None, progress: Callable[[JobStatus], None] | None = None
    ) -> JobStatus:
        """See :meth:`Job.wait`."""
        limit, relay = TimeLimit.from_now(timeout), self._relay(progress)
        look = partial(self._waiter.until_ended, limit, relay, only_end=progress is None)
        return await self._waiter.eventually(look, relay, limit.deadline, only_end=progress is None)

    async def wait_until_sealed(
        self, progress: Callable[[JobStatus], None] | None = None, timeout: float | None = None
    ) -> JobStatus:
        """See :meth:`Job.wait_until_sealed`."""
        limit, relay = TimeLimit.from_now(timeout), self._relay(progress)
        return await self._waiter.eventually(partial(self._waiter.until_sealed, limit, relay), relay, limit.deadline)

    def iter_results(
        self,
        *,
        start: int = 0,
        timeout: float | None = None,
        progress: Callable[[JobStatus], None] | None = None,
    ) -> AsyncIterator[ChunkVectors]:
        """See :meth:`Job.iter_results`."""
        check_timeout(timeout)
        relay = self._relay(progress)
        return self._each(
            lambda at, since: self._reader.chunks(start + at, timeout, relay, since), relay, timeout=timeout
        )

    async def results(self, timeout: float | None = None) -> list[ChunkVectors]:
        """See :meth:`Job.results`."""
        limit, over = TimeLimit.from_now(timeout), threading.Event()
        look = partial(self._reader.at_end, limit)
        warn = self._waiter.warn_of_missing_worker
        if self._waiter.sealed_with == 1 and (waiting := if_few_wait(partial(look, _checked(over, warn)))):
            try:
                return await asyncio.wrap_future(waiting)
            finally:
                over.set()
        relay = self._relay(None)
        return await self._waiter.eventually(partial(look, relay), relay, limit.deadline, only_end=True)

    async def vectors(self) -> Vectors:
        """See :meth:`Job.vectors`."""
        status, vectors = await in_shared_thread(self._reader.empty_vectors)
        async for _ in self._each(lambda at, _: self._reader.fill(status, vectors, at), Relay()):
            pass
        return vectors

    async def sparse(self) -> AsyncIterator[SparseRecord]:
        """See :meth:`Job.sparse`."""
        async for chunk in self.iter_results():
            for record in sparse_records(chunk):
                yield record

    async def multi(self) -> AsyncIterator[MultiRecord]:
        """See :meth:`Job.multi`."""
        async for chunk in self.iter_results():
            for record in multi_records(chunk):
                yield record

    async def iter_errors(self, *, chunks: int | None = None) -> AsyncIterator[FailedRecord]:
        """See :meth:`Job.iter_errors`."""
        await in_shared_thread(self._reader.ended_status)  # as in Job, a Redis that is away is an error at once
        async for errors in self._each(lambda at, _: self._reader.errors_by_chunk(at, most=chunks), Relay()):
            for error in errors:
                yield error

    async def errors(self) -> list[FailedRecord]:
        """See :meth:`Job.errors`."""
        return [error async for error in self.iter_errors()]

    def _relay(self, progress: Progress | None) -> Relay:
        """Passes statuses to `progress`; without that, a missing worker is logged."""
        return Relay(progress or self._waiter.warn_of_missing_worker, is_asked=progress is not None)

    async def _each(
        self, begin: Callable[[int, float], Iterator[T]], relay: Relay, *, timeout: float | None = None
    ) -> AsyncIterator[T]:
        """The items of an iterator that reads with this job's waiter, with at most `timeout` seconds between two.
        `begin` makes it, given how many items to leave out, and since when (monotonic clock) the next one is waited
        for. An iterator is over once it has raised, even NotYet; another one resumes."""
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
            item = await self._waiter.eventually(look, relay, TimeLimit(timeout, since).deadline)
            if isinstance(item, _End):
                return
            yield item
            given, since = given + 1, time.monotonic()


async def discard_all(jobs: Sequence[AsyncJob], also: Sequence[ScriptCall] = ()) -> None:
    """Free jobs of one Redis, as :meth:`AsyncJob.discard`; some may be gone. Small ones whose end was awaited within
    the last second take a common round trip, in which these calls are made too."""
    ended = [status for job in jobs if (status := job._waiter.ended_lately()) is not None]

    def discard() -> None:
        removed = jobs[0]._job._broker.upkeep.remove_complete(ended, also)
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


def _checked(over: threading.Event, call: Callable[[T], None] | None) -> Callable[[T], None]:
    """The same function, which raises once `over` is set."""

    def checked_call(seen: T) -> None:
        _check_not(over)
        if call is not None:
            call(seen)

    return checked_call


def _until(cancelled: threading.Event, records: Iterable[Record]) -> Iterator[Record]:
    for record in records:
        _check_not(cancelled)
        yield record


def _check_not(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise asyncio.CancelledError
