"""Workers that take turns in a fixed order, with the real scripts: who gets which part of them, without a clock."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from embedctl.queueing.broker import Broker
from embedctl.store import Claim
from embedctl_config import wire
from embedctl_config.wire import ChunkInput
from tests.support.store import MINE, encoded, row, spec, take

#: A text that makes a chunk a large one (bytes).
LARGE = 10_000


def job_of(
    broker: Broker, tenant: str = "default", lane: str = "normal", *, chunks: int, size: int = LARGE, **more: object
) -> str:
    """A sealed job whose chunks hold one text of this size each."""
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
        hands: the chunks that workers hold.
        done, had: completed chunks by job, and the work that they were.
        work_of: job → the work that each of its chunks is said to have been; a token for four bytes if it is not there.
    """

    broker: Broker
    count: int = 4
    hands: deque[Claim] = field(default_factory=deque)
    done: Counter[str] = field(default_factory=Counter)
    had: Counter[str] = field(default_factory=Counter)
    work_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(self.count):
            self.broker.workers.beat(row(f"w{number}"))

    def take(self) -> None:
        while len(self.hands) < 2 * self.count and (claim := take(self.broker, secrets.token_hex(4))) is not None:
            self.hands.append(claim)

    def step(self) -> Claim | None:
        """Let the worker whose chunk is the oldest end it, and take the next one; returns that chunk."""
        self.take()
        if not self.hands:
            return None
        held = self.hands.popleft()
        value, report = encoded(held.input)
        report = replace(report, work=self.work_of.get(held.job_id, len(held.input) // 4))
        if self.broker.jobs.complete(held.job_id, held.chunk, held.token, value, report, fingerprint=MINE) == "ok":
            self.done[held.job_id] += 1
            self.had[held.job_id] += report.work
        self.take()
        return held

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def share(self, jobs: Iterable[str]) -> float:
        """The part of all the work that these jobs had."""
        return sum(self.had[job_id] for job_id in jobs) / self.had.total()
