"""The vectors of a request: a job of its own in the interactive lane, which is gone with the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from embedctl import AsyncJob, TruncatedRecord, aenqueue_embeddings
from embedctl.common.daemons import for_nobody
from embedctl.jobs.aio import discard_all
from embedctl.jobs.options import Long
from embedctl.queueing.listening import in_shared_thread
from embedctl.store.ledger import Ledger, Taking, taken_with_job
from embedctl.store.scripts import ScriptCall
from embedctl.waiting.results import Vectors
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import EmbedctlError
from embedctl_config.outputs import PLAIN, Output
from embedctl_config.settings import Settings
from embedctl_config.tenants import INTERACTIVE
from embedctl_gateway.embedding.catalogue import Served
from embedctl_gateway.http.refusals import refusal_of_record, unavailable

#: How long Redis keeps the vectors of a request that no gateway has freed, because it died (seconds).
RESULT_TTL_S = 300.0
#: What answered requests have left in Redis is freed together, this long after the first of them (seconds). Each by
#: itself would take a thread and a round trip, while the next request is encoded.
_FREE_AFTER_S = 0.25
#: So many requests of a tenant make their jobs at once, or one if another tenant has asked in this time (seconds):
#: threads that compute wait for one another, and those of others for them. Large ones, which may wait for room, hold up
#: no small ones.
_MAKING, _LATELY_S = 4, 1.0
#: Characters of the texts of a small one.
_SMALL = 32 * 1024
#: How long a gateway that ends goes on freeing what its requests have left in Redis (seconds).
_TIDY_S = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for. `dimensions`: all if None. `prompt_name`: the model's own default if None. `outputs`:
    the first of these that the model gives."""

    texts: list[str]
    model: str | None = None
    dimensions: int | None = None
    long: Long = "cut"
    normalize: bool = True
    prompt_name: str | None = None
    outputs: Sequence[Output] = PLAIN

    def output_of(self, served: Served) -> Output:
        return next((each for each in self.outputs if each in served.outputs), self.outputs[0])


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to a request: the vectors of its texts (dense ones are float32, texts × dimensions), how many tokens
    of all texts were encoded, the texts of which only the first tokens were, in order, and the model's name."""

    vectors: Vectors | SparseVectors | MultiVectors
    tokens: int
    truncations: list[TruncatedRecord]
    model: str


class Embedder:
    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._freeing: set[asyncio.Task[None]] = set()
        #: Tenant, whether the request is small, and how many may at once → who makes a job now.
        self._making: dict[tuple[str, bool, int], asyncio.Semaphore] = {}
        #: Who asked last, when, and when anybody else did last.
        self._last, self._last_at, self._else_at = "", -inf, -inf
        self._answered: list[AsyncJob] = []
        self._frees_soon = False

    async def embed(self, asked: Asked, served: Served, tenant: str, room: Taking) -> Embedded:
        """The vectors of all texts, by a job that takes this room. A task that is cancelled here cancels the job.
        Raises Refusal if a text has failed, or somebody ended the job; NoRoom; and as the library does."""
        making = self._turn(asked, tenant)
        await making.acquire()
        with taken_with_job(room):
            submitting = asyncio.create_task(self._submit(asked, served, tenant))
        submitting.add_done_callback(lambda _: making.release())
        try:
            # Shielded, because a task that is cancelled as its job is made would not know the job.
            job = await asyncio.shield(submitting)
            model = asked.model or served.name
            embedded = await _read(job, len(asked.texts), asked.output_of(served), model)
        except BaseException:
            self._begin(_give_up(submitting))
            raise
        self._answered.append(job)
        self.tidy_soon()
        return embedded

    def _turn(self, asked: Asked, tenant: str) -> asyncio.Semaphore:
        """What a request of this tenant acquires before it makes its job."""
        if tenant != self._last:
            self._last, self._else_at = tenant, self._last_at
        self._last_at = time.monotonic()
        most = 1 if self._last_at - self._else_at < _LATELY_S else _MAKING
        key = tenant, sum(map(len, asked.texts)) <= _SMALL, most
        return self._making.setdefault(key, asyncio.Semaphore(most))

    def tidy_soon(self) -> None:
        """Free in a moment what requests have left, and tell Redis which room was given back until then."""
        if not self._frees_soon:
            self._frees_soon = True
            self._begin(self._tidy())

    async def close(self) -> None:
        """Wait until nothing is left to be freed."""
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=_TIDY_S)

    def _begin(self, freeing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(freeing, context=for_nobody())
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _tidy(self) -> None:
        await asyncio.sleep(_FREE_AFTER_S)
        self._frees_soon = False
        jobs, self._answered = self._answered, []
        if jobs:
            await _discard(jobs, self._ledger.telling())
            return
        with suppress(EmbedctlError):  # the next renewal tells it
            await in_shared_thread(self._ledger.tell)

    async def _submit(self, asked: Asked, served: Served, tenant: str) -> AsyncJob:
        return await aenqueue_embeddings(
            asked.texts,
            model=served.name,
            # A class has one precision; `auto` takes fp32 unless another one is named.
            precision=served.precision if self._settings.hardware == "auto" else None,
            long=asked.long,
            normalize=asked.normalize,
            prompt_name=asked.prompt_name,
            dimensions=asked.dimensions,
            vectors=asked.output_of(served),
            ttl=RESULT_TTL_S,
            count_tokens=True,
            tenant=tenant,
            lane=INTERACTIVE,
            timeout=self._settings.gateway_timeout_s,
            settings=self._settings,
        )


async def _read(job: AsyncJob, count: int, output: Output, model: str) -> Embedded:
    tokens = read = 0
    truncations: list[TruncatedRecord] = []
    found: list[Any] = []
    for chunk in await job.results():
        if chunk.errors:
            raise refusal_of_record(chunk.errors[0], count)
        found.append(chunk.of(output))
        tokens += 0 if chunk.tokens is None else int(chunk.tokens.sum())
        truncations += chunk.truncations
        read += len(chunk.positions)
    if read < count:
        raise unavailable("the request's job was ended by somebody else", "stopped")
    joined = np.concatenate if output is Output.DENSE else type(found[0]).joined
    return Embedded(found[0] if len(found) == 1 else joined(found), tokens, truncations, model)


async def _give_up(submitting: asyncio.Task[AsyncJob]) -> None:
    """Cancel the job of a request that has no answer, and free what Redis holds of it."""
    await asyncio.wait({submitting})
    if submitting.cancelled() or submitting.exception() is not None:
        return  # the library has cancelled what it had begun
    await _discard([submitting.result()])


async def _discard(jobs: Sequence[AsyncJob], also: Sequence[ScriptCall] = ()) -> None:
    with suppress(EmbedctlError):  # Redis is away; the jobs' time to live frees them
        await discard_all(jobs, also)
