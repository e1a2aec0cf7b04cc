"""What a request leaves in Redis is freed, whatever comes between its answer and that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from embedctl.results import ChunkVectors
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from embedctl_gateway import embedding
from embedctl_gateway.embedding import Asked, Embedder


class Job:
    """A job whose vector is there at once, or never."""

    def __init__(self, *, ends: bool = True) -> None:
        self._ends = ends

    async def results(self) -> list[ChunkVectors]:
        if not self._ends:
            await asyncio.Event().wait()
        return [ChunkVectors(np.arange(1), [None], np.ones((1, 2), np.float32), [], [])]


class Freed:
    """Takes the place of `discard_all`."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.is_away = False

    async def __call__(self, jobs: Sequence[Any]) -> None:
        if self.is_away:
            raise BrokerUnavailable("away")
        self.calls.append(list(jobs))


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Freed:
    found = Freed()
    monkeypatch.setattr(embedding, "discard_all", found)
    monkeypatch.setattr(embedding, "_FREE_AFTER_S", 0.05)
    return found


def embedder_of(monkeypatch: pytest.MonkeyPatch, *jobs: Job) -> Embedder:
    given = iter(jobs)

    async def submit(*_: object) -> Any:
        return next(given)

    monkeypatch.setattr(Embedder, "_submit", submit)
    return Embedder(Settings())


async def ask(embedder: Embedder) -> None:
    served: Any = None
    await embedder.embed(Asked(["a text"]), served, "default")


def test_answered_requests_are_freed_together_and_later_ones_too(monkeypatch: pytest.MonkeyPatch, freed: Freed) -> None:
    jobs = [Job() for _ in range(5)]
    embedder = embedder_of(monkeypatch, *jobs)

    async def run() -> None:
        await asyncio.gather(*(ask(embedder) for _ in range(3)))
        assert freed.calls == []
        await asyncio.sleep(0.1)
        await asyncio.gather(*(ask(embedder) for _ in range(2)))
        await embedder.close()

    asyncio.run(run())
    assert freed.calls == [jobs[:3], jobs[3:]]


def test_a_redis_that_is_away_keeps_no_later_request_from_being_freed(
    monkeypatch: pytest.MonkeyPatch, freed: Freed
) -> None:
    jobs = [Job(), Job()]
    embedder = embedder_of(monkeypatch, *jobs)

    async def run() -> None:
        freed.is_away = True
        await ask(embedder)
        await asyncio.sleep(0.1)
        freed.is_away = False
        await ask(embedder)
        await embedder.close()

    asyncio.run(run())
    assert freed.calls == [[jobs[1]]]


def test_the_job_of_a_caller_who_goes_away_is_freed_at_once(monkeypatch: pytest.MonkeyPatch, freed: Freed) -> None:
    monkeypatch.setattr(embedding, "_FREE_AFTER_S", 60.0)
    job = Job(ends=False)
    embedder = embedder_of(monkeypatch, job)

    async def run() -> None:
        asking = asyncio.create_task(ask(embedder))
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await embedder.close()

    asyncio.run(run())
    assert freed.calls == [[job]]
