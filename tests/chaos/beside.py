"""Thousands of small jobs next to the campaign's own. Most are of a class that nobody serves, so they stay queued."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedctl import Job, JobState, enqueue_embeddings
from embedctl_config import keys
from embedctl_workers.backends.dummy import DummyBackend
from tests.chaos.stack import DIM, NOBODYS, Stack

_SLICE = 200
#: One job in this many is of a served class, and has to end.
_SERVED_OF = 20
_SERVED_CLASS = "quick"
#: Number of served jobs whose results are also read through the library.
_READ = 20
_TEXT = "one of very many"
_TTL_S = 6 * 3600.0


@dataclass
class Beside:
    """The extra jobs: copies of one job that the library made. All its keys are copied, whatever they are.

    Attributes:
        queued: jobs of the class without workers.
        served: jobs of the class with workers.
    """

    stack: Stack
    count: int
    seed: int
    queued: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    _own: list[str] = field(default_factory=list)
    _shared: list[str] = field(default_factory=list)
    _first: str = ""

    def create(self) -> None:
        """Make one job through the library, then copy it in slices."""
        if not self.count:
            return
        settings = self.stack.settings
        job = enqueue_embeddings([_TEXT], model="dummy", hardware=NOBODYS, ttl=_TTL_S, settings=settings)
        self._first = job.id
        self.queued.append(job.id)
        self._find_keys()
        rng = random.Random(f"{self.seed} beside")
        dumps = {name: self.stack.raw.dump(name) for name in self._own}
        scores = {name: self.stack.raw.zscore(name, self._first) for name in self._shared}
        for start in range(1, self.count, _SLICE):
            pipe = self.stack.raw.pipeline(transaction=False)
            for at in range(start, min(start + _SLICE, self.count)):
                self._copy(pipe, dumps, scores, f"{self._first[:-10]}{rng.randrange(1 << 40):010x}", at)
            pipe.execute()
        self.stack.bystanders.update(self.queued)

    def _find_keys(self) -> None:
        """Find the first job's own keys, and the sorted sets that name it."""
        raw = self.stack.raw
        for found in raw.scan_iter(match="embed:*", count=1000):
            name = found.decode()
            if self._first in name:
                self._own.append(name)
            elif raw.type(name) == b"zset" and raw.zscore(name, self._first) is not None:
                self._shared.append(name)

    def _copy(self, pipe: Any, dumps: dict[str, bytes], scores: dict[str, float], job_id: str, at: int) -> None:
        for name, dump in dumps.items():
            pipe.restore(name.replace(self._first, job_id), int(_TTL_S * 1000), dump)
        for name, score in scores.items():
            pipe.zadd(name, {job_id: score})
        if at % _SERVED_OF:
            self.queued.append(job_id)
        else:
            self.served.append(job_id)
            pipe.hset(keys.job(job_id), "hardware", _SERVED_CLASS)

    @property
    def ids(self) -> set[str]:
        return {*self.queued, *self.served}

    def unended(self) -> list[str]:
        """Served jobs that have not ended."""
        states = self._states(self.served)
        return [job_id for job_id, state in states.items() if state is None or not state.ended]

    def settle(self, deadline: float) -> list[str]:
        """Wait for the served jobs, then check all jobs. Return the problems, in words."""
        while (unended := self.unended()) and time.monotonic() < deadline:
            time.sleep(0.5)
        wrong = [f"{len(unended)} of {len(self.served)} small jobs beside did not end"] if unended else []
        states = self._states(self.served)
        bad = [job_id for job_id, state in states.items() if job_id not in unended and state != JobState.COMPLETED]
        gone = [job_id for job_id, state in self._states(self.queued).items() if state is not JobState.QUEUED]
        wrong += [f"{len(bad)} small jobs beside ended otherwise than completed: {bad[:3]}"] if bad else []
        wrong += [f"{len(gone)} queued jobs beside are not queued any more: {gone[:3]}"] if gone else []
        readable = [job_id for job_id in self.served if job_id not in unended and job_id not in bad]
        return wrong + self._read(readable[:_READ])

    def remove(self) -> None:
        """Remove all these jobs, which would otherwise live for hours."""
        ids = sorted(self.ids)
        kinds = {name.replace(self._first, "{}") for name in self._own}
        for start in range(0, len(ids), _SLICE):
            pipe = self.stack.raw.pipeline(transaction=False)
            for job_id in ids[start : start + _SLICE]:
                kept = (keys.attempts, keys.owners, keys.due, keys.reissues, keys.cursors, keys.events, keys.counted)
                names = {kind.format(job_id) for kind in kinds} | {key(job_id) for key in kept}
                pipe.unlink(*names, keys.chunk_input(job_id, 0), keys.chunk_result(job_id, 0))
                for name in self._shared:
                    pipe.zrem(name, job_id)
            pipe.execute()

    def _states(self, ids: list[str]) -> dict[str, JobState | None]:
        found: dict[str, JobState | None] = {}
        for start in range(0, len(ids), _SLICE):
            some = ids[start : start + _SLICE]
            pipe = self.stack.raw.pipeline(transaction=False)
            for job_id in some:
                pipe.hget(keys.job(job_id), "state")
            states = [None if state is None else JobState(state.decode()) for state in pipe.execute()]
            found.update(zip(some, states, strict=True))
        return found

    def _read(self, ids: list[str]) -> list[str]:
        backend = DummyBackend(dim=DIM)
        wanted = backend.finish(backend.forward(backend.tokenize([_TEXT], None), np.array([0])), normalize=True)
        vectors = {job_id: Job(job_id, self.stack.broker).vectors() for job_id in ids}
        wrong = [job_id for job_id, found in vectors.items() if not np.array_equal(found, wanted)]
        return [f"small jobs beside have wrong vectors: {wrong}"] if wrong else []
