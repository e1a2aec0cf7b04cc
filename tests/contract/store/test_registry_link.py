"""What a supervisor's link to the registry of workers learns from it and reports to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from redis import Redis

from embedctl.broker import Broker
from embedctl.machine import machine_id, process_id
from embedctl.store import WorkerRow
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.supervising.registry_link import RegistryLink
from tests.support.redis_server import RedisServer
from tests.support.store import claim, due_in_s, new_job, row
from tests.support.waiting import eventually


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a worker might be."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def link(broker: Broker) -> Iterator[RegistryLink]:
    link = RegistryLink(broker)
    yield link
    link.close()


def worker(process: subprocess.Popen[bytes]) -> WorkerRow:
    return row(pid=process.pid, machine=machine_id(), process=process_id(process.pid))


def fates(broker: Broker) -> dict[str, str]:
    return {gone.worker.instance: gone.how for gone in broker.workers.gone()}


def test_a_process_is_a_worker_once_it_says_so_and_another_one_of_its_number_is_not_it(
    broker: Broker, link: RegistryLink, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.workers.beat(row(instance="earlier", pid=process.pid, machine=machine_id(), process=f"{process.pid}.1"))
    broker.workers.beat(row(instance="far", pid=process.pid, machine="another", process=process_id(process.pid)))
    looks: list[None] = []
    here = broker.workers.here

    def counted() -> Iterator[WorkerRow]:
        looks.append(None)
        return here()

    monkeypatch.setattr(broker.workers, "here", counted)
    link.expect(process.pid)
    eventually(lambda: len(looks) > 1, what="a second look: the first one came to its end")
    assert link.row_of(process.pid) is None
    broker.workers.beat(worker(process))
    eventually(lambda: link.row_of(process.pid))
    found = link.row_of(process.pid)
    assert found is not None
    assert found.instance == "w"


def test_a_death_is_reported_at_once_and_what_was_held_is_overdue(
    broker: Broker, settings: Settings, raw: Redis, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    broker.workers.beat(worker(process))
    link.expect(process.pid)
    eventually(lambda: link.row_of(process.pid))
    lasting = Broker.connect(settings.replace(lease_s=600))  # no lease lapses during the test
    job_id = new_job(lasting)
    claim(lasting, job_id, 0)
    lasting.close()
    broker.workers.beat(replace(worker(process), holding=((job_id, 0),)))
    process.kill()
    process.wait()
    link.report_exit(process.pid, "killed by SIGKILL")
    eventually(lambda: fates(broker))
    assert fates(broker) == {"w": "killed by SIGKILL"}
    eventually(lambda: due_in_s(broker, raw, job_id, 0) <= 0)
    assert broker.workers.witness() == set()  # who looks later has nothing less exact to say
    assert fates(broker) == {"w": "killed by SIGKILL"}


def test_a_worker_that_nobody_blames_has_left(
    broker: Broker, raw: Redis, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    broker.workers.beat(worker(process))
    link.report_exit(process.pid, "")
    eventually(lambda: raw.get(keys.died("w")) == keys.LEFT.encode())
    assert list(broker.workers.alive()) == []
    assert fates(broker) == {}


def test_a_death_is_reported_when_redis_is_back(
    own_redis: RedisServer, settings: Settings, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker.connect(settings.replace(redis_url=own_redis.url))
    link = RegistryLink(broker)
    try:
        broker.workers.beat(worker(process))
        link.expect(process.pid)
        eventually(lambda: link.row_of(process.pid))
        own_redis.stop()
        link.report_exit(process.pid, "killed by SIGKILL")
        eventually(lambda: "can't be looked up" in caplog.text)
        own_redis.start()
        eventually(lambda: fates(broker))
        assert fates(broker) == {"w": "killed by SIGKILL"}
    finally:
        link.close()
        broker.close()
