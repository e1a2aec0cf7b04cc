"""The asynchronous twins: the same names and arguments, and what lies between an event loop and its threads."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

import pytest

from embedctl import AsyncJob, BrokerUnavailable, Job, Settings, aenqueue_embeddings, enqueue_embeddings
from embedctl.jobs import aio
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import Listener
from embedctl.waiting import waiter
from embedctl.waiting.waiter import NotYet, Relay, Waiter
from embedctl_config import retry
from embedctl_config.errors import BrokerFull, WaitTimeout
from tests.support.clocks import SleptClock
from tests.support.waiting import PATIENCE_S, eventually

#: Parameters and results whose types differ, as the twin's are asynchronous.
ASYNC_TYPES = {
    "Iterable[RecordLike] | AsyncIterable[RecordLike]": "Iterable[RecordLike]",
    "AsyncIterator[ChunkVectors]": "Iterator[ChunkVectors]",
    "AsyncIterator[FailedRecord]": "Iterator[FailedRecord]",
    "AsyncIterator[SparseRecord]": "Iterator[SparseRecord]",
    "AsyncIterator[MultiRecord]": "Iterator[MultiRecord]",
    "AsyncJob": "Job",
}


def shape(function: Callable[..., object]) -> tuple[list[tuple[object, ...]], object]:
    """What a caller sees: the parameters, and what comes back; annotations as they are written."""
    signature = inspect.signature(function)
    parameters: list[tuple[object, ...]] = [
        (each.name, each.kind, each.default, ASYNC_TYPES.get(each.annotation, each.annotation))
        for each in signature.parameters.values()
    ]
    return parameters, ASYNC_TYPES.get(signature.return_annotation, signature.return_annotation)


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_a_job_and_its_twin_have_the_same_methods() -> None:
    assert public(AsyncJob) == public(Job)
    for name in public(Job):
        plain, twin = inspect.getattr_static(Job, name), inspect.getattr_static(AsyncJob, name)
        if isinstance(plain, property):
            plain, twin = plain.fget, twin.fget
        else:
            plain, twin = inspect.unwrap(getattr(Job, name)), inspect.unwrap(getattr(AsyncJob, name))
            returned = inspect.signature(twin).return_annotation
            assert inspect.iscoroutinefunction(twin) or "AsyncIterator" in str(returned), name
        assert shape(twin) == shape(plain), name


def test_submitting_and_its_twin_take_and_give_the_same() -> None:
    assert inspect.iscoroutinefunction(aenqueue_embeddings)
    assert shape(aenqueue_embeddings) == shape(enqueue_embeddings)


def in_a_thread(work: Callable[[], list[object]]) -> Future[list[object]]:
    done: Future[list[object]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever asks for the result gets it)
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def test_a_text_comes_to_the_thread_as_soon_as_it_is_there() -> None:
    async def main() -> None:
        more = asyncio.Event()
        seen: list[object] = []

        async def texts() -> AsyncIterator[str]:
            yield "first"
            await more.wait()
            yield "second"

        def read(feed: aio._Feed) -> list[object]:
            seen.extend(feed)
            return seen

        feed = aio._Feed(texts())
        reading = in_a_thread(lambda: read(feed))
        await asyncio.to_thread(eventually, lambda: seen == ["first"])
        more.set()
        assert await asyncio.wait_for(asyncio.wrap_future(reading), PATIENCE_S) == ["first", "second"]
        await feed.close()

    asyncio.run(main())


def test_texts_are_read_ahead_of_the_thread_but_not_far() -> None:
    async def main() -> None:
        given = 0

        async def texts() -> AsyncIterator[str]:
            nonlocal given
            for given in itertools.count(1):  # noqa: B007  (the test looks at it)
                yield "text"

        feed = aio._Feed(texts())
        await asyncio.to_thread(eventually, lambda: given >= aio._AHEAD)
        for _ in range(100):
            await asyncio.sleep(0)  # a turn of the loop, in which it would read on
        assert given <= aio._AHEAD + 1
        await feed.close()

    asyncio.run(main())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_feed_that_is_stopped_does_not_look_like_one_that_has_ended(at_once: bool) -> None:
    async def texts() -> AsyncIterator[str]:
        yield "first"
        await asyncio.Event().wait()

    async def main() -> None:
        feed = aio._Feed(texts())
        seen: list[object] = []
        reading = in_a_thread(lambda: [*map(seen.append, feed)])
        await asyncio.sleep(0)
        if not at_once:
            await asyncio.to_thread(eventually, lambda: seen)
        feed.stop()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(reading)), PATIENCE_S)
        await feed.close()

    asyncio.run(main())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleptClock:
    clock = SleptClock()
    for module in (retry, waiter):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.asleep)

    async def nothing_happens(_: Listener, job_id: str, seen: str, timeout_s: float, *, only_end: bool) -> str:
        clock.sleep(timeout_s)
        return seen

    monkeypatch.setattr(Listener, "next_event", nothing_happens)
    return clock


@pytest.fixture
def job() -> AsyncJob:
    return AsyncJob(Job("20261121-000000-0000000000", Broker.connect(Settings(redis_url="unix:///nowhere"))))


#: Nobody's events are heard here.
NOBODY = Waiter("20261121-000000-0000000000", Broker.connect(Settings(redis_url="unix:///nowhere")))
NOT_YET = NotYet()


def looking(look: Callable[[], str], deadline: float | None = None) -> str:
    return asyncio.run(NOBODY.eventually(look, Relay(), deadline))


def raising_until(clock: SleptClock, moment: float, error: Exception) -> Callable[[], str]:
    def look() -> str:
        if clock.now < moment:
            raise error
        return "seen"

    return look


def test_pauses_grow_with_the_time_waited(clock: SleptClock) -> None:
    assert looking(raising_until(clock, 1100, NOT_YET)) == "seen"
    assert clock.pauses[0] == 1.0
    assert clock.pauses[-1] == 5.0
    assert clock.pauses == sorted(clock.pauses)
    late = [pause / (sum(clock.pauses[:at]) or 1) for at, pause in enumerate(clock.pauses)]
    assert max(late[8:]) <= 1 / 8 + 1e-9


def test_who_wants_to_be_told_is_told_every_second(clock: SleptClock) -> None:
    relay = Relay(lambda _: None, is_asked=True)
    asyncio.run(NOBODY.eventually(raising_until(clock, 1100, NOT_YET), relay))
    assert set(clock.pauses) == {1.0}


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), BrokerFull("full")])
def test_a_deadline_ends_the_wait_for_redis_as_a_timeout(clock: SleptClock, error: Exception) -> None:
    with pytest.raises(WaitTimeout, match=str(error)):
        looking(raising_until(clock, 9999, error), deadline=1010)
    assert clock.now == pytest.approx(1010)


def test_what_asks_once_says_at_once_that_redis_is_away(job: AsyncJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_S", math.inf)  # who asked again would do so for ever
    for ask in (job.status, job.vectors, job.errors, job.workers):
        with pytest.raises(BrokerUnavailable, match="can't be reached"):
            asyncio.run(ask())
