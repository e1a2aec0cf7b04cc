"""Random lives of a job: whatever happens in whichever order, what it says of itself stays true."""

from __future__ import annotations

import random

import pytest
import redis as redis_py

from embedctl.broker import Broker
from embedctl.store import Added
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.limits import limited
from tests.support.store import (
    MINE,
    OTHER,
    QUEUE,
    add,
    assert_consistent,
    audited,
    claim,
    complete,
    members,
    new_job,
    overdue,
    reaped,
    row,
)

CHUNKS = 5
STEPS = 80


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return limited(settings.replace(lease_s=30.0), reissue_s=60.0, window=3)


class Life:
    """One job, and everybody who may do something to it."""

    def __init__(self, broker: Broker, raw: redis_py.Redis, seed: int) -> None:
        self.broker, self.raw, self.dice = broker, raw, random.Random(seed)
        self.job_id = new_job(broker, 0, seal=False, data=broker.chunk_files.make_place())
        self.added = 0

    def token(self) -> str:
        return self.dice.choice("abc")

    def chunk(self) -> int:
        return self.dice.randrange(max(1, self.added))

    def add(self) -> None:
        if self.added < CHUNKS and not self.broker.jobs.status(self.job_id).sealed:
            assert add(self.broker, self.job_id, self.added)[0] is Added.OK
            self.added += 1

    def add_again(self) -> None:
        if self.added:
            assert add(self.broker, self.job_id, self.chunk())[0] is Added.SKIPPED

    def seal(self) -> None:
        if self.added == CHUNKS:
            self.broker.jobs.seal(self.job_id, CHUNKS)

    def issue(self) -> None:
        self.broker.jobs.issue(self.job_id, QUEUE)

    def claim(self) -> None:
        claim(self.broker, self.job_id, self.chunk(), self.token(), fingerprint=self.dice.choice([MINE, MINE, OTHER]))

    def renew(self) -> None:
        self.broker.jobs.renew(self.job_id, self.chunk(), self.token())

    def release(self) -> None:
        self.broker.jobs.release(self.job_id, self.chunk(), self.token(), delay_s=1)

    def complete(self) -> None:
        if self.added:
            fingerprint = self.dice.choice([MINE, MINE, OTHER])
            chunk = self.chunk()
            complete(self.broker, self.job_id, chunk, self.token(), failed=chunk % 3, fingerprint=fingerprint)

    def lapse(self) -> None:
        due = members(self.raw, keys.due(self.job_id))
        if due:
            overdue(self.raw, self.job_id, int(self.dice.choice(due)))

    def reap(self) -> None:
        reaped(self.broker, self.job_id)

    def audit(self) -> None:
        assert audited(self.broker, self.job_id) == 0

    def forget(self) -> None:
        """What a crash of Redis may do to an issued chunk."""
        chunk = self.chunk()
        self.raw.zrem(keys.due(self.job_id), chunk)
        for name in (keys.owners, keys.attempts, keys.reissues):
            self.raw.hdel(name(self.job_id), chunk, f"{chunk}:sent")

    def lose(self) -> None:
        """Redis loses a result, and the corpus repairs the chunk."""
        stored = [chunk for chunk in range(self.added) if self.raw.exists(keys.chunk_result(self.job_id, chunk))]
        if stored:
            chunk = self.dice.choice(stored)
            self.raw.delete(keys.chunk_result(self.job_id, chunk))
            assert add(self.broker, self.job_id, chunk)[0] is Added.OK

    def finish(self) -> None:
        """Whatever happened before, workers who go on bring the job to its end."""
        while self.added < CHUNKS:
            self.add()
        self.broker.jobs.seal(self.job_id, CHUNKS)
        fingerprint = self.broker.jobs.status(self.job_id).model_fingerprint or MINE
        for _ in range(3 * CHUNKS):
            self.broker.jobs.issue(self.job_id, QUEUE)
            self.audit()
            due = [int(chunk) for chunk in members(self.raw, keys.due(self.job_id))]
            overdue(self.raw, self.job_id, *due)
            for chunk in reaped(self.broker, self.job_id):
                if claim(self.broker, self.job_id, chunk, "last", fingerprint=fingerprint).answer == "ok":
                    complete(self.broker, self.job_id, chunk, "last", failed=chunk % 3, fingerprint=fingerprint)


ACTIONS = [
    Life.add,
    Life.add_again,
    Life.seal,
    Life.issue,
    Life.claim,
    Life.claim,
    Life.renew,
    Life.release,
    Life.complete,
    Life.lapse,
    Life.reap,
    Life.audit,
    Life.forget,
    Life.lose,
]


#: What differs where chunks are in a bucket, a few lives show: each takes twenty times as long there.
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.in_redis) for seed in range(5, 14))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_the_counts_are_true_and_the_job_ends(broker: Broker, raw: redis_py.Redis, seed: int) -> None:
    broker.workers.beat(row())
    life = Life(broker, raw, seed)
    done: list[str] = []
    for _ in range(STEPS):
        action = life.dice.choice(ACTIONS)
        done.append(action.__name__)
        action(life)
        try:
            assert_consistent(broker, raw, life.job_id)
        except AssertionError as error:
            raise AssertionError(f"after {done}") from error
    life.finish()
    status = broker.jobs.status(life.job_id)
    assert (status.state, status.records, status.done, status.failed) == ("completed_with_errors", 10, 6, 4)
    assert_consistent(broker, raw, life.job_id)
