"""What a supervisor's link to the registry of workers learns from it and reports to it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embedctl.broker import Broker
from embedctl.machine import machine_id, process_id
from embedctl.store import WorkerRow
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.supervising.registry_link import RegistryLink
from tests.support.redis_server import CLASSES, QUICK, RedisServer
from tests.support.store import claim, new_job, row


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


def worker(process: subprocess.Popen[bytes], instance: str = "w") -> WorkerRow:
    return row(instance=instance, pid=process.pid, machine=machine_id(), process=process_id(process.pid))


def within(seconds: float, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)


def fates(broker: Broker) -> dict[str, str]:
    return {gone.worker.instance: gone.how for gone in broker.workers.gone()}


def test_a_process_is_a_worker_once_it_says_so(
    broker: Broker, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    link.expect(process.pid)
    time.sleep(0.4)
    assert link.row_of(process.pid) is None
    broker.workers.beat(worker(process))
    within(2, lambda: link.row_of(process.pid))
    found = link.row_of(process.pid)
    assert found is not None
    assert found.instance == "w"


def test_another_process_of_the_same_number_is_not_it(
    broker: Broker, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    earlier = row(instance="earlier", pid=process.pid, machine=machine_id(), process=f"{process.pid}.1")
    elsewhere = row(instance="elsewhere", pid=process.pid, machine="another", process=process_id(process.pid))
    broker.workers.beat(earlier)
    broker.workers.beat(elsewhere)
    link.expect(process.pid)
    time.sleep(0.6)
    assert link.row_of(process.pid) is None


def test_a_death_is_reported_at_once_and_what_was_held_is_overdue(
    broker: Broker, raw, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    broker.workers.beat(worker(process))
    link.expect(process.pid)
    within(2, lambda: link.row_of(process.pid))
    job_id = new_job(broker)
    claim(broker, job_id, 0)
    process.kill()
    process.wait()
    link.report_exit(process.pid, "killed by SIGKILL")
    within(1, lambda: fates(broker))
    assert fates(broker) == {"w": "killed by SIGKILL"}
    within(0.5, lambda: raw.zscore(keys.due(job_id), 0) <= broker.connection.now_ms())
    assert broker.workers.witness() == set()  # who looks later has nothing less exact to say
    assert fates(broker) == {"w": "killed by SIGKILL"}


def test_a_worker_that_nobody_blames_has_left(
    broker: Broker, raw, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    broker.workers.beat(worker(process))
    link.report_exit(process.pid, "")
    within(1, lambda: raw.get(keys.died("w")) == keys.LEFT.encode())
    assert list(broker.workers.alive()) == []
    assert fates(broker) == {}


def test_the_end_of_a_process_that_never_was_a_worker_is_no_news(
    broker: Broker, raw, link: RegistryLink, process: subprocess.Popen[bytes]
) -> None:
    link.expect(process.pid)
    link.report_exit(process.pid, "killed by SIGKILL")
    link.close()
    assert list(raw.scan_iter(keys.died("*"))) == []


def test_a_death_is_reported_when_redis_is_back(short_folder: Path, process: subprocess.Popen[bytes]) -> None:
    server = RedisServer(short_folder)
    server.start()
    broker = Broker.connect(Settings(redis_url=server.url, classes=CLASSES, hardware="dummy", model="dummy", **QUICK))
    link = RegistryLink(broker)
    try:
        broker.workers.beat(worker(process))
        link.expect(process.pid)
        within(2, lambda: link.row_of(process.pid))
        server.stop()
        link.report_exit(process.pid, "killed by SIGKILL")
        time.sleep(1)
        server.start()
        within(15, lambda: fates(broker))
        assert fates(broker) == {"w": "killed by SIGKILL"}
    finally:
        link.close()
        broker.close()
        server.stop()
