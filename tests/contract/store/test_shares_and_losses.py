"""Jobs of several tenants, whatever stands between any two steps: all of them end, and no turn is lost for ever.

Random walks over the real scripts, from a seed. A process dies between `issue` and its tickets, a worker dies with a
chunk, a ticket is lost or comes twice, somebody cancels a job, the keys that say whose
turn it is are lost, and Redis comes back without its last writes, with its tickets or without. After that nothing goes
wrong any more: the reaper looks at every job, and everything must end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Claimant, Issued
from embedctl_config import keys
from embedctl_config.errors import JobCancelled
from embedctl_config.settings import Settings
from tests.support.limits import limited
from tests.support.shares import Workers, add_chunk
from tests.support.store import QUEUE, reaped, spec

CHUNKS = 6


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return limited(settings.replace(lease_s=300.0), reissue_s=600.0, window=2, window_per_worker=1)


class Walk:
    """Some jobs of a queue, and the steps that may happen to them."""

    def __init__(self, broker: Broker, raw: Redis, seed: int) -> None:
        self.broker, self.dice = broker, random.Random(seed)
        self.raw: Any = raw  # its own types are unions
        self.workers = Workers(broker, count=2)
        kinds = [("x", "normal"), ("x", "normal"), ("y", "normal"), ("y", "interactive"), ("default", "background")]
        self.jobs = [broker.jobs.create(spec(tenant=tenant, lane=lane))[0] for tenant, lane in kinds]
        self.past: list[dict[bytes, bytes]] = []
        self.past_tickets: list[list[Issued]] = []

    def step(self) -> None:
        steps = [self.produce] * 6 + [self.workers.step] * 8 + [self.look] * 2
        steps += [self.dies_before_sending, self.loses_a_ticket, self.sends_one_twice, self.worker_dies]
        if self.dice.random() < 0.15:
            steps = [self.goes_back, self.loses_turns, self.cancels, self.stops]
        self.remember()
        self.dice.choice(steps)()

    def remember(self) -> None:
        found = {key: self.raw.dump(key) for key in self.raw.scan_iter("embed:*")}
        self.past = [*self.past, {key: value for key, value in found.items() if value}][-4:]
        self.past_tickets = [*self.past_tickets, list(self.workers.tickets)][-4:]

    def goes_back(self) -> None:
        back = self.dice.randrange(len(self.past))
        self.raw.flushdb()
        for key, value in self.past[back].items():
            self.raw.restore(key, 86_400_000, value)
        if self.dice.random() < 0.5:
            self.workers.tickets.clear()
            self.workers.tickets.extend(self.past_tickets[back])

    def added(self, job_id: str) -> int:
        return int(self.raw.hget(keys.job(job_id), "added") or 0)

    def produce(self, job_id: str = "") -> None:
        job_id = job_id or self.dice.choice(self.jobs)
        status = self.broker.jobs.status(job_id)
        if status.state.ended or status.sealed:
            return
        if status.chunks < CHUNKS:
            add_chunk(self.broker, job_id, status.chunks, self.dice.choice([100, 20_000]))
        else:
            self.broker.jobs.seal(job_id, CHUNKS)
        if self.dice.random() < 0.9:  # else it dies before it issues
            self.workers.issue(job_id)

    def look(self, job_id: str = "") -> None:
        """The reaper's look at a job, and at the queues."""
        job_id = job_id or self.dice.choice(self.jobs)
        again = reaped(self.broker, job_id)
        self.workers.tickets.extend(Issued(job_id, chunk) for chunk in again)
        self.workers.issue(job_id)
        self.fill()

    def fill(self) -> None:
        for issued in self.broker.upkeep.issue_waiting().values():
            self.workers.tickets.extend(issued)

    def dies_before_sending(self) -> None:
        self.broker.jobs.issue(self.dice.choice(self.jobs), QUEUE)

    def loses_a_ticket(self) -> None:
        if self.workers.tickets:
            del self.workers.tickets[self.dice.randrange(len(self.workers.tickets))]

    def sends_one_twice(self) -> None:
        if self.workers.tickets:
            self.workers.tickets.append(self.dice.choice(list(self.workers.tickets)))

    def worker_dies(self) -> None:
        self.workers.take()
        if self.workers.hands:
            held = self.workers.hands.popleft()
            self.broker.jobs.claim(held.job_id, held.chunk, "dead", Claimant("w9", "aa" * 32))

    def loses_turns(self) -> None:
        doomed = [key for key in self.raw.scan_iter("embed:reaper:*") if key != keys.UPKEEP.encode()]
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
        """Nothing goes wrong any more. Time passes: leases lapse, and tickets fall due."""
        for _ in range(60):
            for job_id in self.jobs:
                self.produce(job_id)
                for chunk in self.raw.zrange(keys.due(job_id), 0, -1):
                    if self.raw.hexists(keys.owners(job_id), chunk) or not self.is_on_its_way(job_id, int(chunk)):
                        self.raw.zadd(keys.due(job_id), {chunk: 1})
                self.raw.zadd(keys.UPKEEP, {job_id: 1}, xx=True)
                self.look(job_id)
            self.raw.delete(keys.background_pause(QUEUE))
            self.workers.run(8)
            if all(self.broker.jobs.status(job_id).state.ended for job_id in self.jobs):
                return

    def is_on_its_way(self, job_id: str, chunk: int) -> bool:
        return any(
            (each.job_id, each.chunk) == (job_id, chunk) for each in (*self.workers.tickets, *self.workers.hands)
        )

    def wrong(self) -> Iterator[str]:
        for job_id in self.jobs:
            status = self.broker.jobs.status(job_id)
            if not status.state.ended:
                yield f"job {self.jobs.index(job_id)} does not end: {status}"
            elif status.state == "completed" and status.done != CHUNKS:
                yield f"job {self.jobs.index(job_id)} has {status.done} records"
        self.broker.jobs.issue("", QUEUE)
        for key in self.raw.scan_iter("embed:reaper:*"):
            if self.raw.ttl(key) < 0:
                yield f"{key!r} has no TTL"
        if self.raw.exists(keys.lanes(QUEUE)):
            yield "a queue waits, and no job does"


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 24), marks=pytest.mark.slow)], ids=["few", "many"])
def test_whatever_goes_wrong_every_job_has_its_turn(broker: Broker, raw: Redis, seeds: range) -> None:
    for seed in seeds:
        raw.flushdb()
        walk = Walk(broker, raw, seed)
        for _ in range(60):
            walk.step()
        walk.end()
        assert list(walk.wrong()) == [], f"seed {seed}"
