"""Workers that take turns in a fixed order, with the real scripts: who gets which part of them, without a clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from embedctl.queueing.broker import Broker
from embedctl.store import Claimant, Issued
from embedctl_config import wire
from embedctl_config.wire import ChunkInput
from tests.support.store import MINE, QUEUE, encoded, row, spec

#: A text that makes a chunk a large one (bytes).
LARGE = 10_000


def job_of(
    broker: Broker, tenant: str = "default", lane: str = "normal", *, chunks: int, size: int = LARGE, **more: object
) -> str:
    """A sealed job whose chunks hold one text of this size each. No ticket is sent."""
    job_id, _ = broker.jobs.create(spec(tenant=tenant, lane=lane, **more))
    for chunk in range(chunks):
        add_chunk(broker, job_id, chunk, size)
    broker.jobs.seal(job_id, chunks)
    return job_id


def add_chunk(broker: Broker, job_id: str, chunk: int, size: int = LARGE) -> None:
    data = wire.encode_input(ChunkInput(chunk, bytes(1), [(b"%06d" % chunk).ljust(size, b"x")]))
    broker.jobs.add(job_id, chunk, data, digest=wire.digest_of(data), rows=1, token="p")


@dataclass
class Workers:
    """Workers that hold two chunks each and end them in the order in that they took them.

    Attributes:
        tickets: those that wait.
        hands: the chunks that workers hold.
        done: completed chunks by job, in all.
        idle: how often a worker found no ticket.
    """

    broker: Broker
    count: int = 4
    tickets: deque[Issued] = field(default_factory=deque)
    hands: deque[Issued] = field(default_factory=deque)
    done: Counter[str] = field(default_factory=Counter)
    idle: int = 0

    def __post_init__(self) -> None:
        for number in range(self.count):
            self.broker.workers.beat(row(f"w{number}"))

    def issue(self, job_id: str = "", over: int | None = None) -> None:
        """What a producer, a worker or the reaper does: choose chunks, and send their tickets."""
        self.tickets.extend(self.broker.jobs.issue(job_id, QUEUE, over))

    def take(self) -> None:
        while len(self.hands) < 2 * self.count:
            if not self.tickets:
                self.idle += 1
                return
            self.hands.append(self.tickets.popleft())

    def step(self) -> Issued | None:
        """Let the worker whose chunk is the oldest end it, and take the next ticket; returns that chunk."""
        self.take()
        if not self.hands:
            return None
        held = self.hands.popleft()
        token = f"t{held.chunk}"
        jobs = self.broker.jobs
        claim = jobs.claim(held.job_id, held.chunk, token, Claimant("w0", MINE))
        if claim.answer == "ok":
            value, report = encoded(claim.input)
            assert jobs.complete(held.job_id, held.chunk, token, value, report, fingerprint=MINE) == "ok"
            self.done[held.job_id] += 1
        self.issue(held.job_id, held.chunk)
        self.take()
        return held

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def share(self, jobs: Sequence[str]) -> float:
        """The part of all completed chunks that these jobs had."""
        return sum(self.done[job_id] for job_id in jobs) / self.done.total()
