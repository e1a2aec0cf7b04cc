"""Jobs of several tenants, whatever stands between any two steps: all of them end, and no turn is lost for ever.

Random walks over the real scripts, from a seed. A worker dies with a chunk, gives one back, or asks again because an
answer was lost, somebody cancels or stops a job, the keys that say whose turn it is are lost, and Redis comes back
without its last writes. After that nothing goes wrong any more: the reaper looks at every job, and everything must end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl_config import keys
from embedctl_config.errors import JobCancelled
from tests.support.shares import Workers, add_chunk
from tests.support.store import QUEUE, reaped, spec, take

CHUNKS = 6


class Walk:
    """Some jobs of a queue, and the steps that may happen to them."""

    def __init__(self, broker: Broker, raw: Redis, seed: int) -> None:
        self.broker, self.dice = broker, random.Random(seed)
        self.raw: Any = raw  # its own types are unions
        self.workers = Workers(broker, count=2)
        kinds = [("x", "normal"), ("x", "normal"), ("y", "normal"), ("y", "interactive"), ("default", "background")]
        self.jobs = [broker.jobs.create(spec(tenant=tenant, lane=lane))[0] for tenant, lane in kinds]
        self.past: list[dict[bytes, bytes]] = []

    def step(self) -> None:
        steps: list[Callable[[], object]] = [*[self.produce] * 6, *[self.workers.step] * 8, *[self.look] * 2]
        steps += [self.gives_back, self.asks_again, self.worker_dies]
        if self.dice.random() < 0.15:
            steps = [self.goes_back, self.loses_turns, self.cancels, self.stops]
        self.remember()
        self.dice.choice(steps)()

    def remember(self) -> None:
        found = {key: self.raw.dump(key) for key in self.raw.scan_iter("embed:*")}
        self.past = [*self.past, {key: value for key, value in found.items() if value}][-4:]

    def goes_back(self) -> None:
        back = self.dice.randrange(len(self.past))
        self.raw.flushdb()
        for key, value in self.past[back].items():
            self.raw.restore(key, 86_400_000, value)

    def produce(self, job_id: str = "") -> None:
        job_id = job_id or self.dice.choice(self.jobs)
        status = self.broker.jobs.status(job_id)
        if status.state.ended or status.sealed:
            return
        if status.chunks < CHUNKS:
            add_chunk(self.broker, job_id, status.chunks, self.dice.choice([100, 20_000]))
        else:
            self.broker.jobs.seal(job_id, CHUNKS)

    def look(self, job_id: str = "") -> None:
        """The reaper's look at a job."""
        reaped(self.broker, job_id or self.dice.choice(self.jobs))

    def gives_back(self) -> None:
        self.workers.take()
        if self.workers.hands:
            held = self.workers.hands.popleft()
            others_first_s = self.dice.choice([0.0, 600.0])
            self.broker.jobs.release(held.job_id, held.chunk, held.token, delay_s=0, others_first_s=others_first_s)

    def asks_again(self) -> None:
        if self.workers.hands:
            held = self.dice.choice(list(self.workers.hands))
            again = take(self.broker, held.token)
            if again is not None and (again.job_id, again.chunk) != (held.job_id, held.chunk):
                self.workers.hands.append(again)  # Redis lost the first answer

    def worker_dies(self) -> None:
        self.workers.take()
        if self.workers.hands:
            self.workers.hands.popleft()

    def loses_turns(self) -> None:
        doomed = list(self.raw.scan_iter(keys.turns("*")))
        if doomed:
            self.raw.delete(*self.dice.sample(doomed, self.dice.randint(1, len(doomed))))

    def cancels(self) -> None:
        if self.dice.random() < 0.3:
            self.broker.jobs.cancel(self.dice.choice(self.jobs[1:]))

    def stops(self) -> None:
        if self.dice.random() < 0.3:
            with suppress(JobCancelled):
                self.broker.jobs.stop(self.dice.choice(self.jobs[1:]))

    def end(self) -> None:
        """Nothing goes wrong any more. Time passes: leases of the dead lapse, and the reaper looks at every job."""
        for job_id in self.jobs:
            for _ in range(CHUNKS + 1):
                self.produce(job_id)
        self.workers.run(len(self.jobs) * CHUNKS)
        for _ in range(60):
            for job_id in self.jobs:
                for chunk in self.raw.zrange(keys.leases(job_id), 0, -1):
                    if not self.is_held(job_id, int(chunk)):
                        self.raw.zadd(keys.leases(job_id), {chunk: 1})
                for chunk in self.raw.zrange(keys.suspects(job_id), 0, -1):
                    self.raw.zadd(keys.suspects(job_id), {chunk: 1})
                self.raw.hdel(keys.attempts(job_id), *(f"{chunk}:not" for chunk in range(CHUNKS)))
                self.look(job_id)
            self.raw.delete(keys.turns(f"pause:{QUEUE}"))
            self.workers.run(8)
            if all(self.broker.jobs.status(job_id).state.ended for job_id in self.jobs):
                return

    def is_held(self, job_id: str, chunk: int) -> bool:
        return any((each.job_id, each.chunk) == (job_id, chunk) for each in self.workers.hands)

    def wrong(self) -> Iterator[str]:
        for job_id in self.jobs:
            status = self.broker.jobs.status(job_id)
            if not status.state.ended:
                yield f"job {self.jobs.index(job_id)} does not end: {status}"
            elif status.state == "completed" and status.done != CHUNKS:
                yield f"job {self.jobs.index(job_id)} has {status.done} records"
        if take(self.broker, "end") is not None:
            yield "a chunk is given, and no job waits"
        for key in self.raw.scan_iter("embed:*"):
            if self.raw.ttl(key) < 0:
                yield f"{key!r} has no TTL"
        for kind in ("flows", "left", "wait"):
            yield from (f"{key!r} is left" for key in self.raw.scan_iter(keys.turns(f"{kind}:*")))


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 24), marks=pytest.mark.slow)], ids=["few", "many"])
def test_whatever_goes_wrong_every_job_has_its_turn(broker: Broker, raw: Redis, seeds: range) -> None:
    for seed in seeds:
        raw.flushdb()
        walk = Walk(broker, raw, seed)
        for _ in range(60):
            walk.step()
        walk.end()
        assert list(walk.wrong()) == [], f"seed {seed}"
