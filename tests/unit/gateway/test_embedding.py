"""What a request leaves in Redis is freed, whatever comes between its answer and that."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from embedctl.store.connection import Connection
from embedctl.store.ledger import Ledger
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from embedctl_gateway.embedding import embedder as embedder_module
from embedctl_gateway.embedding.catalogue import Served
from embedctl_gateway.embedding.embedder import Asked, Embedder
from tests.support.waiting import eventually

#: Gives nothing back, so it asks no Redis.
LEDGER = Ledger(Connection(Settings(redis_url="unix:///nonexistent/redis.sock")))


class Job:
    """A job whose vector is there at once, or never."""

    def __init__(self, *, ends: bool = True) -> None:
        self._ends = ends
        self.is_awaited = False

    async def results(self) -> list[ChunkVectors]:
        self.is_awaited = True
        if not self._ends:
            await asyncio.Event().wait()
        return [ChunkVectors(np.arange(1), [None], np.ones((1, 2), np.float32), [], [])]


class Freed:
    """Takes the place of `discard_all`, and of the moment before that, which lasts until `moment` is set."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.tries = 0
        self.is_away = False
        self.moment = asyncio.Event()

    async def sleep(self, _: float) -> None:
        await self.moment.wait()

    async def __call__(self, jobs: Sequence[Any], also: Sequence[Any] = ()) -> None:
        self.tries += 1
        if self.is_away:
            raise BrokerUnavailable("away")
        self.calls.append(list(jobs))


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Freed:
    found = Freed()
    monkeypatch.setattr(embedder_module, "discard_all", found)
    monkeypatch.setattr(asyncio, "sleep", found.sleep)
    return found


def embedder_of(monkeypatch: pytest.MonkeyPatch, *jobs: Job) -> Embedder:
    given = iter(jobs)

    async def submit(*_: object) -> Any:
        return next(given)

    monkeypatch.setattr(Embedder, "_submit", submit)
    return Embedder(Settings(), LEDGER)


async def ask(embedder: Embedder) -> None:
    served = Served("m", "fp32", 2, 256, "")
    await embedder.embed(Asked(["a text"]), served, "default", LEDGER.taking("default", {}))


def test_answered_requests_are_freed_together_and_later_ones_too(monkeypatch: pytest.MonkeyPatch, freed: Freed) -> None:
    jobs = [Job() for _ in range(5)]
    embedder = embedder_of(monkeypatch, *jobs)

    async def run() -> None:
        await asyncio.gather(*(ask(embedder) for _ in range(3)))
        assert freed.calls == []
        freed.moment.set()
        await asyncio.to_thread(eventually, lambda: freed.calls)
        await asyncio.gather(*(ask(embedder) for _ in range(2)))
        await embedder.close()

    asyncio.run(run())
    assert freed.calls == [jobs[:3], jobs[3:]]


def test_a_redis_that_is_away_keeps_no_later_request_unfreed(monkeypatch: pytest.MonkeyPatch, freed: Freed) -> None:
    jobs = [Job(), Job()]
    embedder = embedder_of(monkeypatch, *jobs)

    async def run() -> None:
        freed.is_away = True
        await ask(embedder)
        freed.moment.set()
        await asyncio.to_thread(eventually, lambda: freed.tries)
        freed.is_away = False
        await ask(embedder)
        await embedder.close()

    asyncio.run(run())
    assert freed.calls == [[jobs[1]]]


def test_a_tenant_makes_few_jobs_at_once_and_one_beside_others(monkeypatch: pytest.MonkeyPatch, freed: Freed) -> None:
    made: list[tuple[str, int]] = []
    room = asyncio.Event()

    async def submit(_: Embedder, asked: Asked, __: object, tenant: str) -> Any:
        made.append((tenant, len(asked.texts)))
        await room.wait()
        return Job()

    monkeypatch.setattr(Embedder, "_submit", submit)
    monkeypatch.setattr(embedder_module, "_LATELY_S", 3600.0)  # however slowly this runs
    embedder = Embedder(Settings(), LEDGER)
    served: Any = None

    async def run() -> None:
        asks = [("eve", 2048)] * 10 + [("eve", 1)] * 10 + [("bob", 1)]
        taking = LEDGER.taking("default", {})

        async def embed(tenant: str, texts: int) -> None:
            await embedder.embed(Asked(["word " * 10] * texts), served, tenant, taking)

        tasks = [asyncio.create_task(embed(*each)) for each in asks]
        await asyncio.to_thread(eventually, lambda: ("bob", 1) in made)
        assert Counter(made) == {("eve", 2048): 4, ("eve", 1): 4, ("bob", 1): 1}
        # Another tenant asks, so each makes one at a time from now on.
        later = [("bob", 1), ("eve", 2), ("eve", 2)]
        tasks += [asyncio.create_task(embed(*each)) for each in later]
        await asyncio.to_thread(eventually, lambda: ("eve", 2) in made)
        assert Counter(made) == {("eve", 2048): 4, ("eve", 1): 4, ("bob", 1): 1, ("eve", 2): 1}
        tasks[9].cancel()
        room.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert Counter(made) == {("eve", 2048): 9, ("eve", 1): 10, ("bob", 1): 2, ("eve", 2): 2}


def test_the_job_of_a_caller_who_goes_away_is_freed_at_once(monkeypatch: pytest.MonkeyPatch, freed: Freed) -> None:
    job = Job(ends=False)
    embedder = embedder_of(monkeypatch, job)

    async def run() -> None:
        asking = asyncio.create_task(ask(embedder))
        await asyncio.to_thread(eventually, lambda: job.is_awaited)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await embedder.close()

    asyncio.run(run())
    assert freed.calls == [[job]]
