"""The asynchronous twins of `enqueue_embeddings` and `Job`: the same code in threads, so that no event loop waits.

Whatever asks Redis one thing, or looks whether something has happened, does so in one of a few threads that all jobs
share; between two looks a task sleeps and holds no thread, so that any number of tasks may wait at once. A submission
reads its texts, and waits for workers, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from enum import Enum, auto
from functools import cache, partial
from typing import NoReturn, Self, TypeVar, cast

from embedctl.broker import Broker
from embedctl.daemons import DaemonThreads
from embedctl.enqueue import JobOptions, Truncation, parse_budget, submit
from embedctl.job import Job
from embedctl.patience import OUTAGE_S, check_timeout, out_of_time
from embedctl.records import Record, RecordLike, records_of
from embedctl.results import ChunkVectors, FailedRecord, Vectors
from embedctl.store import GoneWorker, JobStatus, Suspect, WorkerRow
from embedctl.store.connection import answers_by
from embedctl.submission import SubmitProgress
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable, EmbedctlError
from embedctl_config.settings import Settings, load_settings

T = TypeVar("T")

_THREADS = 16
#: A task that has waited for some time looks again after this part of it, within these bounds (seconds).
_PAUSE_PART = 1 / 8
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
#: Most texts of an async iterable that are read before the submitting thread takes them.
_AHEAD = 1024
#: How long a cancelled submission may take to free what it has queued (seconds); then it does so by itself.
_TIDY_S = 2.0


async def aenqueue_embeddings(
    texts: Iterable[RecordLike] | AsyncIterable[RecordLike],
    *,
    model: str | None = None,
    hardware: str | None = None,
    precision: str | None = None,
    ids: Iterable[str | int | None] | None = None,
    prompt: str | None = None,
    truncation: Truncation = "truncate",
    normalize: bool = True,
    dimensions: int | None = None,
    chunk_size: int | None = None,
    ttl: float | None = None,
    idempotency_key: str | None = None,
    max_errors: int | str | None = None,
    timeout: float | None = None,
    progress: SubmitProgress | None = None,
    settings: Settings | None = None,
) -> AsyncJob:
    """Queue texts for embedding; see :func:`enqueue_embeddings`, whose arguments and errors these are.

    `progress` is called in the event loop, without waiting for it.

    `texts` may be an async iterable as well, which is read in the event loop. Any other one is read in a thread, as are
    `ids`. Cancelling the task that awaits this also cancels the half-submitted job, unless it has an idempotency key,
    with which the same call goes on.
    """
    check_timeout(timeout)
    most, share = parse_budget(max_errors)
    options = JobOptions(
        model=model,
        hardware=hardware,
        precision=precision,
        prompt=prompt,
        truncation=truncation,
        normalize=normalize,
        dimensions=dimensions,
        chunk_size=chunk_size,
        ttl=ttl,
        idempotency_key=idempotency_key,
        max_errors=most,
        max_errors_share=share,
    )
    feed = _Feed(texts) if isinstance(texts, AsyncIterable) else None
    cancelled = threading.Event()

    def work() -> Job:
        chosen = load_settings() if settings is None else settings
        source = cast("Iterable[RecordLike]", texts) if feed is None else feed
        records = records_of(source, ids=ids, max_bytes=chosen.max_text_bytes)
        return submit(Broker.shared(chosen), _until(cancelled, records), options, told, timeout)

    loop = asyncio.get_running_loop()

    def told(records: int, waiting_for: str) -> None:
        _check_not(cancelled)
        if progress is not None:
            loop.call_soon_threadsafe(progress, records, waiting_for)

    submitted = _in_a_thread_of_its_own(work)
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
    """A :class:`Job` whose methods are awaited; what they do, take, return and raise is described there.

    Tasks that wait may be cancelled at any time; the job goes on.

    Args:
        job: the job that it is the twin of.
    """

    def __init__(self, job: Job) -> None:
        self._job = _Looking(job.id, job._broker, sealed_with=job._sealed_with)

    @classmethod
    async def get(cls, job_id: str, settings: Settings | None = None) -> AsyncJob:
        """The job of that id; see :meth:`Job.get`."""
        return cls(await _ask(partial(Job.get, job_id, settings)))

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an AsyncJob can't be pickled: send its id, and get it there by AsyncJob.get({self.id!r})")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of this process that are idle; see :meth:`Job.close`."""
        await _ask(self._job.close)

    @property
    def id(self) -> str:
        """Its id; it begins with the time of its creation, in UTC."""
        return self._job.id

    async def status(self) -> JobStatus:
        """Its facts at this moment."""
        return await _ask(self._job.status)

    async def workers(self) -> list[WorkerRow]:
        """The live workers that serve its class and model, as they last described themselves."""
        return await _ask(self._job.workers)

    async def gone_workers(self) -> list[GoneWorker]:
        """The workers of its class and model that went without a good-bye in the last minutes."""
        return await _ask(self._job.gone_workers)

    async def suspects(self) -> list[Suspect]:
        """The chunks an owner of which died and which have not ended since, each with its history."""
        return await _ask(self._job.suspects)

    async def wait(
        self, timeout: float | None = None, progress: Callable[[JobStatus], None] | None = None
    ) -> JobStatus:
        """Wait until the job has ended, and look after it meanwhile; see :meth:`Job.wait`.

        `progress` is called in the event loop. The end is noticed an eighth of the time waited too late at most, and
        never more than a second.
        """
        check_timeout(timeout)
        began = time.monotonic()
        told = self._teller(progress)
        deadline = None if timeout is None else began + timeout
        return await self._eventually(lambda: self._job._wait(timeout, began, told), told, deadline)

    async def wait_until_sealed(
        self, progress: Callable[[JobStatus], None] | None = None, timeout: float | None = None
    ) -> JobStatus:
        """Wait until the job has all its records; see :meth:`Job.wait_until_sealed`."""
        check_timeout(timeout)
        began = time.monotonic()
        told = self._teller(progress)
        deadline = None if timeout is None else began + timeout
        return await self._eventually(lambda: self._job._wait_until_sealed(timeout, began, told), told, deadline)

    def iter_results(
        self,
        *,
        start: int = 0,
        timeout: float | None = None,
        progress: Callable[[JobStatus], None] | None = None,
    ) -> AsyncIterator[ChunkVectors]:
        """The results in input order, chunk by chunk, each as soon as it is there; see :meth:`Job.iter_results`."""
        check_timeout(timeout)
        told = self._teller(progress)
        return self._each(
            lambda at, since: self._job._iter_results(start + at, timeout, since, told), told, timeout=timeout
        )

    async def vectors(self) -> Vectors:
        """Every vector: float32, records × dimensions, in input order; see :meth:`Job.vectors`."""
        vectors = await _ask(self._job._unfilled)
        async for _ in self._each(lambda at, _: self._job._fill(vectors, at), _Told()):
            pass
        return vectors

    async def iter_errors(self) -> AsyncIterator[FailedRecord]:
        """The records of an ended job that have no vector, in input order; see :meth:`Job.iter_errors`."""
        await _ask(self._job._ended_status)  # what does not wait tells at once that Redis is away
        async for errors in self._each(lambda at, _: self._job._errors_by_chunk(at), _Told()):
            for error in errors:
                yield error

    async def errors(self) -> list[FailedRecord]:
        """The records without a vector, in input order; see :meth:`iter_errors`."""
        return [error async for error in self.iter_errors()]

    async def retry_failed(self, timeout: float | None = None) -> int:
        """Queue the records that failed once more; how many they are. See :meth:`Job.retry_failed`."""
        # It waits for a Redis that is away, which a thread that all share must not.
        retry = partial(Job(self.id, self._job._broker).retry_failed, timeout)
        return await asyncio.wrap_future(_in_a_thread_of_its_own(retry))

    async def cancel(self) -> JobStatus:
        """End the job now; see :meth:`Job.cancel`."""
        return await _ask(self._job.cancel)

    async def discard(self) -> None:
        """Free the job and everything stored for it, now."""
        await _ask(self._job.discard)

    def _teller(self, progress: Callable[[JobStatus], None] | None) -> _Told:
        """Tells `progress`; where there is none, the log what the job waits for."""
        return _Told(progress or partial(self._job._tell, progress=None))

    async def _each(
        self, begin: Callable[[int, float], Iterator[T]], told: _Told, *, timeout: float | None = None
    ) -> AsyncIterator[T]:
        """What an iterator of the synchronous job gives.

        Args:
            begin: makes such an iterator, given how many items to leave out, and since when (monotonic clock) the next
                one is waited for. One that has raised, if only _NotYet, is at its end, and another goes on.
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
            item = await self._eventually(look, told, None if timeout is None else since + timeout)
            if isinstance(item, _End):
                return
            yield item
            given, since = given + 1, time.monotonic()

    async def _eventually(self, look: Callable[[], T], told: _Told, deadline: float | None = None) -> T:
        """Look again and again until there is something to see, also while Redis is full, or away for `OUTAGE_S`.

        Args:
            look: asks the synchronous job, and raises _NotYet where that would wait. Called in a thread.
            deadline: by the monotonic clock; a look after it does not raise _NotYet.
        """
        began = time.monotonic()
        away_since: float | None = None
        while True:
            try:
                seen = await _ask(partial(_answered_by, deadline, look))
            except _NotYet:
                away_since = None
            except BrokerRefused:
                told.pass_on()
                raise
            except BrokerUnavailable as error:
                now = time.monotonic()
                if away_since is None or isinstance(error, BrokerFull):
                    away_since = now
                if now - away_since > OUTAGE_S:
                    raise
                if deadline is not None and now >= deadline:
                    raise out_of_time(error) from error
            except EmbedctlError:
                told.pass_on()
                raise
            else:
                told.pass_on()
                return seen
            told.pass_on()
            now = time.monotonic()
            pause = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, (now - began) * _PAUSE_PART))
            await asyncio.sleep(pause if deadline is None else min(pause, max(0.0, deadline - now)))


def _answered_by(deadline: float | None, look: Callable[[], T]) -> T:
    with answers_by(deadline):
        return look()


class _NotYet(Exception):
    """Raised in a thread in place of waiting: whoever wants to wait does so without the thread."""


class _End(Enum):
    """What comes after the last item; an item may be anything else, None included."""

    END = auto()


class _Looking(Job):
    """A job that looks and never waits: it raises _NotYet instead, and BrokerUnavailable at once."""

    def _next_event(self, seen: str, timeout_s: float, deadline: float | None = None) -> str:
        self._patiently(partial(self._reaper.round, deadline), deadline)
        raise _NotYet

    def _patiently(self, ask: Callable[[], T], deadline: float | None = None) -> T:
        try:
            return ask()
        except BrokerUnavailable:
            self._pausing()
            raise


class _Told:
    """Takes what a thread tells of a job's progress to the event loop."""

    def __init__(self, progress: Callable[[JobStatus], None] | None = None) -> None:
        self._progress = progress
        self._status: JobStatus | None = None

    def __call__(self, status: JobStatus) -> None:
        self._status = status

    def pass_on(self) -> None:
        """Tell the last status, unless that was told already."""
        if self._progress is not None and self._status is not None:
            self._progress(self._status)
        self._status = None


class _Feed:
    """The texts of an async iterable, for a thread to iterate over. Reads them in the event loop that makes this."""

    def __init__(self, texts: AsyncIterable[RecordLike]) -> None:
        self._texts = texts
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Queue[RecordLike | _End] = asyncio.Queue()
        self._room = asyncio.Semaphore(_AHEAD)
        self._reading = asyncio.create_task(self._read_ahead())
        # Not at the end of what the task runs: one that is cancelled before its first step runs nothing.
        self._reading.add_done_callback(lambda _: self._read.put_nowait(_End.END))

    def __iter__(self) -> Iterator[RecordLike]:
        while batch := asyncio.run_coroutine_threadsafe(self._take(), self._loop).result():
            yield from batch

    def stop(self) -> None:
        """Read no more; the thread that wants more gets CancelledError."""
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
        """The texts that were read, at least one; none at the end, where whatever ended it is raised."""
        texts: list[RecordLike] = []
        while not texts or not self._read.empty():
            text = await self._read.get()
            if isinstance(text, _End):
                self._read.put_nowait(text)  # for the next one who asks
                if not texts:
                    await self._reading
                return texts
            texts.append(text)
            self._room.release()
        return texts


@cache
def _threads() -> DaemonThreads:
    """Not the loop's own, so that nobody's `to_thread` waits for ours, nor ours for it.

    Daemons: a Redis that says nothing must not keep a process from ending.
    """
    return DaemonThreads(_THREADS, "embedctl")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its parent's threads


async def _ask(question: Callable[[], T]) -> T:
    """Ask in a thread. A task that is cancelled does not wait for the answer."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), copy_context().run, question)


def _in_a_thread_of_its_own(work: Callable[[], T]) -> Future[T]:
    """Do what may take long. The thread is a daemon: texts that never come must not keep a process from ending."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever awaits it gets it)
            done.set_exception(error)

    threading.Thread(target=partial(copy_context().run, run), name="embedctl-submit", daemon=True).start()
    return done


def _until(cancelled: threading.Event, records: Iterable[Record]) -> Iterator[Record]:
    for record in records:
        _check_not(cancelled)
        yield record


def _check_not(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise asyncio.CancelledError
