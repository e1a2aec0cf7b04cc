"""`embedctl repair` makes every index again from the records, beside everybody else and after a repair that was killed.

The indexes are all keys that `keys.py` declares but the records and the leases below. So a new one is covered.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from redis import Redis

from embedctl import enqueue_embeddings
from embedctl.cli import main
from embedctl.queueing.broker import Broker
from embedctl.store.backlog import START, read_slice
from embedctl.store.batches import BatchStore, EventStore, Step
from embedctl.store.stored_files import FileStore, Once
from embedctl.waiting.overview import Gatherer
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_config.tenants import TenantEntry
from tests.support.forked import Forked
from tests.support.jobs import reference
from tests.support.store import (
    at_use,
    claim,
    complete,
    lapse,
    leases,
    members,
    new_job,
    reaped,
    row,
    spec,
    take,
    work,
)
from tests.support.waiting import PATIENCE_S
from tests.support.workers import CONFIG

TENANT = "search"
ANY, SOME = "*", "00000000-000000-0000000000"
#: What jobs, files, batches and events are, and nothing else says.
RECORDS = {
    keys.job(keys.JOB_IDS),
    keys.attempts(keys.JOB_IDS),
    keys.counted(keys.JOB_IDS),
    keys.chunk_input(keys.JOB_IDS, ANY),
    keys.chunk_result(keys.JOB_IDS, ANY),
    keys.retry_pointer(keys.JOB_IDS, ANY),
    keys.uncommitted_result(keys.JOB_IDS, ANY, ANY),  # type: ignore[arg-type]  # as a pattern
    keys.drained(keys.JOB_IDS),
    keys.parts(keys.JOB_IDS),
    keys.digests(keys.JOB_IDS),
    keys.file(ANY),
    keys.batch(ANY),
    keys.webhook_event(ANY),
}
#: What lasts for moments: tokens, notes of what a process is doing, and what it hears. It is made again by its owner.
LEASES = {
    keys.producer(keys.JOB_IDS),
    keys.drainer(keys.JOB_IDS),
    keys.cursors(keys.JOB_IDS),
    keys.made(ANY),
    keys.died(ANY),
    keys.watched(ANY),
    keys.faults(ANY),
    keys.heartbeat(ANY),
    keys.starting(ANY),
    keys.STARTING,
    keys.machine(ANY),
    keys.stating(ANY),
    keys.queue_quarantine(ANY),
    keys.REAPER,
    keys.NOTES,
    keys.SWEEP,
    keys.CLOCK,
    keys.ledger(ANY),
    keys.UNACKED,
    keys.UNACKED_INDEX,
    keys.UNACKED_MUTEX,
    keys.queue(ANY, ANY),
}
TURNS = {keys.turns(ANY)}
INDEXES = sorted({*keys.ACCESS, *(f"{prefix}*" for prefix in keys.TURNS)} - RECORDS - LEASES - TURNS)


@dataclass
class World:
    """Jobs in every state, and what the gateway has."""

    broker: Broker
    raw: Redis
    jobs: dict[str, str] = field(default_factory=dict)

    def make(self) -> None:
        broker = self.broker
        self.beat()
        self.jobs["ended"] = new_job(broker, 2, keeps="1000000000 0 0 1")
        work(broker, self.jobs["ended"], 0, failed=1)
        work(broker, self.jobs["ended"], 1)
        self.jobs["long"] = new_job(broker, 1, ttl_s=2.0 * keys.UNENDED_TTL_S)
        work(broker, self.jobs["long"], 0)
        self.jobs["dead"] = new_job(broker, 2)
        assert claim(broker, self.jobs["dead"], 0, "d", instance="dead") is not None
        broker.workers.report_death("dead", "killed")
        lapse(self.raw, self.jobs["dead"], 0)
        assert reaped(broker, self.jobs["dead"]) == [0]
        self.jobs["back"] = new_job(broker, 2)
        assert claim(broker, self.jobs["back"], 0, "b") is not None
        assert broker.jobs.release(self.jobs["back"], 0, "b", delay_s=0.0)
        self.jobs["running"] = new_job(broker, 3, tenant=TENANT, idempotency_key="nightly")
        work(broker, self.jobs["running"], 0)
        assert claim(broker, self.jobs["running"], 1, "held") is not None
        self.jobs["submitting"] = new_job(broker, 1, seal=False, lane="interactive", tenant=TENANT)
        self.jobs["background"] = new_job(broker, 2, lane="background")
        work(broker, self.jobs["background"], 0)
        self.jobs["cancelled"] = new_job(broker, 1)
        broker.jobs.cancel(self.jobs["cancelled"])
        self.jobs["stopped"] = new_job(broker, 2)
        broker.jobs.stop(self.jobs["stopped"])
        self._files()

    def _files(self) -> None:
        files, batches = FileStore(self.broker.connection, self.broker.chunk_files), BatchStore(self.broker.connection)
        writer = files.writer()
        writer.add(b"{}")
        files.make(writer.finish(tenant=TENANT, name="f", purpose="batch", ttl_s=100), Once("f", "digest", again=False))
        for name in ("over", "open"):
            batches.make(f"batch_{name}", {"tenant": TENANT}, Once(name, "digest", again=False))
            if name == "over":
                taken = batches.take("token", 60.0)
                assert taken is not None
                batches.note(taken, "token", Step({"status": "completed"}, after="end", told=True))

    def beat(self) -> None:
        """What a live worker does every two seconds, and with its limits every thirty."""
        self.broker.workers.beat(row())
        limits = TenantEntry(weight=2.0, max_jobs=10, max_waiting_records=100, max_waiting_bytes=10_000)
        assert self.broker.quotas.state(TENANT, limits, by="w", since_ms=1) is None

    def seen(self) -> dict[str, Any]:
        """What people are shown."""
        overview = Gatherer(self.broker).look()
        return {
            "listed": {*self.broker.jobs.newest_ids(100)},
            "upkept": {*members(self.raw, keys.ACTIVE)},
            "looked at": {*members(self.raw, keys.UPKEEP)},
            "active": ({each.job.id for each in overview.active}, overview.active_count),
            "queues": [(each.hardware, each.model, each.chunks) for each in overview.queues],
            "workers": [each.row.instance for each in overview.workers],
            "backlog": sorted((each.tenant, each.chunks) for each in read_slice(self.broker.connection, START).jobs),
            "quotas": self.broker.quotas.all(10),
            "birth": self.raw.get(keys.BIRTH) is not None
            and {each.id for each in self.broker.jobs.find(list(self.jobs.values()))},
            "unserved": members(self.raw, keys.QUEUES),
        }

    def finish(self) -> None:
        """Let every job end, with all of its vectors."""
        assert self.broker.jobs.create(spec(tenant=TENANT, idempotency_key="nightly")) == (self.jobs["running"], False)
        assert complete(self.broker, self.jobs["running"], 1, "held") == "ok"
        self.broker.jobs.seal(self.jobs["submitting"], 1)
        assert self.broker.jobs.retry(self.jobs["ended"], 0, 2, "p") == 1
        self.broker.jobs.seal(self.jobs["ended"], 2)
        self.raw.zadd(keys.suspects(self.jobs["dead"]), {"0": 1}, xx=True)
        for given in iter(lambda: take(self.broker, secrets.token_hex(4)), None):
            assert given is not None
            assert complete(self.broker, given.job_id, given.chunk, given.token) == "ok"
        for name in ("ended", "long", "dead", "back", "running", "submitting", "background"):
            job = self.broker.jobs.status(self.jobs[name])
            assert (job.state, job.done) == ("completed", job.records), name
            assert all(self.broker.jobs.result(job.id, chunk) for chunk in range(job.chunks)), name
        files, batches = FileStore(self.broker.connection, self.broker.chunk_files), BatchStore(self.broker.connection)
        assert [each.name for some in files.newest(TENANT, 10) for each in some] == ["f"]
        assert {each.id for some in batches.newest(TENANT, 10) for each in some} == {"batch_over", "batch_open"}
        taken = batches.take("another", 60.0)
        assert taken is not None
        assert taken.id == "batch_open"
        assert batches.take("another", 60.0) is None
        event = EventStore(self.broker.connection).take("another", 60.0)
        assert event is not None
        assert event.batch_id == "batch_over"

    def found(self, pattern: str) -> list[str]:
        names = [name.decode() for name in self.raw.scan_iter(match="embed*", count=1000)]
        return [name for name in names if fnmatchcase(name, pattern)]


@pytest.fixture
def world(broker: Broker, raw: Redis) -> World:
    made = World(broker, raw)
    made.make()
    return made


@pytest.mark.parametrize("pattern", INDEXES)
def test_every_index_is_made_again_from_the_records(world: World, pattern: str) -> None:
    before, doomed = world.seen(), world.found(pattern)
    assert doomed, "the world has such an index"
    world.raw.delete(*doomed)
    world.beat()
    repaired = list(world.broker.repair.steps())
    assert (sum(each.jobs for each in repaired), {*repaired[0].unreadable}) == (len(world.jobs), set())
    assert sum(each.lost for each in repaired) == 0
    assert world.seen() == before
    assert [name for name in world.found("embed:*") if world.raw.pttl(name) < 0] == []
    world.finish()


def test_a_repair_may_die_between_any_two_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    before = world.seen()
    world.raw.delete(*(name for pattern in INDEXES for name in world.found(pattern)))
    world.beat()
    number = 0
    while True:
        number += 1
        with monkeypatch.context() as patch:
            at_use(number, world.broker.connection, kill, patch)
            try:
                list(world.broker.repair.steps())
            except Killed:
                continue
        break
    assert number > 5
    assert world.seen() == before
    world.finish()


def produce(number: int, settings: Settings, over: threading.Event) -> int:
    """Make jobs, one after the other, each with its vectors, and with each of them once."""
    draw, jobs = random.Random(number), 0
    while not over.is_set():
        texts = [f"{number} {jobs} {at}" for at in range(draw.randint(1, 200))]
        job = enqueue_embeddings(texts, chunk_size=8, lane=draw.choice(("interactive", "normal")), settings=settings)
        status = job.wait(timeout=PATIENCE_S)
        assert (status.state, status.done, status.failed) == ("completed", len(texts), 0)
        assert [at for chunk in job.iter_results() for at in chunk.positions] == list(range(len(texts)))
        np.testing.assert_array_equal(job.vectors(), reference(texts))
        job.discard()
        jobs += 1
    return jobs


@pytest.mark.slow
def test_a_repair_beside_workers_and_producers_loses_and_doubles_nothing(
    broker: Broker, raw: Redis, settings: Settings, short_folder: Path
) -> None:
    """Every index is deleted in its turn, alone or with others, while jobs are made, worked on and read."""
    (short_folder / "embedctl.toml").write_text(CONFIG)
    own = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_")}
    own |= {"EMBEDCTL_REDIS_URL": settings.redis_url, "EMBEDCTL_CONFIG": str(short_folder / "embedctl.toml")}
    log, draw, over, world = short_folder / "log", random.Random(41), threading.Event(), World(broker, raw)
    arguments = ["worker", "--class", "dummy", "--model", "dummy"]
    workers = [Forked(arguments, own, short_folder, log, log) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        producers = [pool.submit(produce, number, settings, over) for number in range(3)]
        try:
            for pattern in draw.sample(INDEXES, len(INDEXES)):
                time.sleep(draw.uniform(0.0, 0.5))  # a random moment of everything
                raw.unlink("none", *(name for each in (pattern, draw.choice(INDEXES)) for name in world.found(each)))
                time.sleep(draw.choice((0.0, 0.3)))
                repaired = list(broker.repair.steps())
                assert [(each.lost, each.unreadable) for each in repaired if each.lost or each.unreadable] == []
        finally:
            over.set()
    assert min(producer.result() for producer in producers) > 0
    for worker in workers:
        worker.kill()
        worker.wait()
    assert not list(broker.jobs.newest())


def test_a_job_that_cannot_be_read_is_named_and_hides_no_other(world: World) -> None:
    world.raw.hset(keys.job(world.jobs["back"]), "created_ms", "never")
    world.raw.hset(keys.job(world.jobs["dead"]), "version", "99")
    world.raw.delete(keys.JOBS)
    (step,) = world.broker.repair.steps()
    assert {*step.unreadable} == {world.jobs["back"], world.jobs["dead"]}
    assert step.jobs == len(world.jobs) - 2


def test_the_command_says_what_it_did(world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDCTL_REDIS_URL", settings.redis_url)
    world.raw.delete(keys.ready(world.jobs["back"]))
    said = CliRunner().invoke(main, ["repair"])
    assert (said.exit_code, said.stdout) == (
        0,
        "9 jobs and 5 other records are listed; 1 chunks that nobody had are ready again, 0 are lost\n",
    )
    world.raw.hset(keys.job(world.jobs["back"]), "version", "99")
    found = CliRunner().invoke(main, ["repair", "--json"])
    facts = json.loads(found.stdout)
    assert (found.exit_code, facts["jobs"], [*facts["unreadable"]]) == (1, 8, [world.jobs["back"]])


def test_a_long_job_is_audited_in_slices(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.store.upkeep._SLICE", 2)
    job_id = new_job(broker, 5)
    for chunk in range(5):
        assert claim(broker, job_id, chunk, f"t{chunk}") is not None
    raw.delete(keys.owners(job_id))
    (step,) = broker.repair.steps()
    assert step.again == 5
    assert sorted(claim.chunk for claim in _all(broker)) == [0, 1, 2, 3, 4]


def test_an_owner_whose_lease_lapsed_while_redis_was_away_keeps_its_chunk(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 1)
    assert claim(broker, job_id, 0, "t") is not None
    lapse(raw, job_id, 0)
    (step,) = broker.repair.steps()
    assert (step.again, [*leases(raw, job_id)]) == (0, [0])


def _all(broker: Broker) -> Iterator[Any]:
    return iter(lambda: take(broker, secrets.token_hex(4)), None)
