"""A host name leads to one master, then to another. Clients with connections to the old master follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import redis as redis_py

from embedctl import BrokerRefused, BrokerUnavailable, JobState, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import StartWorker


@dataclass
class Site:
    """Two instances, and the name of the one that is the master."""

    name: Proxy
    old: redis_py.Redis
    new: redis_py.Redis
    to_new: Proxy
    new_socket: Path

    def fail_over(self) -> None:
        """Fail over like a managed Redis: no connection is closed."""
        eventually(lambda: _offset(self.new) == _offset(self.old))
        self.new.replicaof("NO", "ONE")
        self.old.replicaof("127.0.0.1", self.to_new.port)
        self.name.lead_to(self.new_socket)


def _offset(instance: redis_py.Redis) -> int:
    info = instance.info("replication")
    return int(info.get("slave_repl_offset", info["master_repl_offset"]))


@pytest.fixture
def site(short_folder: Path) -> Iterator[Site]:
    servers, proxies = [], []
    for name in "ab":
        (short_folder / name).mkdir()
        servers.append(RedisServer(short_folder / name))
        servers[-1].start()
    sockets = [server.folder / "redis.sock" for server in servers]
    for socket in (sockets[0], *sockets):
        proxies.append(Proxy(socket))
        proxies[-1].start()
    old, new = (redis_py.Redis.from_url(server.url) for server in servers)
    new.replicaof("127.0.0.1", proxies[1].port)
    eventually(lambda: new.info("replication").get("master_link_status") == "up")
    yield Site(proxies[0], old, new, proxies[2], sockets[1])
    for each in (old, new):
        each.close()
    for proxy in proxies:
        proxy.stop()
    for server in servers:
        server.stop()


@pytest.fixture
def environment(environment: dict[str, str], site: Site) -> dict[str, str]:
    return {**environment, "EMBEDCTL_REDIS_URL": site.name.url}


def test_producer_and_worker_follow_the_name_to_the_new_master(
    site: Site, settings: Settings, start_worker: StartWorker
) -> None:
    worker = start_worker()
    before = enqueue_embeddings(["one", "two"], settings=settings)
    assert before.wait(timeout=60).state is JobState.COMPLETED
    site.fail_over()
    after = enqueue_embeddings(["three", "four", "five"], chunk_size=1, settings=settings)
    assert after.wait(timeout=60).state is JobState.COMPLETED
    assert before.vectors().shape == (2, 16)
    assert worker.process.poll() is None
    assert site.new.exists(keys.job(after.id))
    worker.broker.close()
    eventually(lambda: not _by_name(site))


@pytest.mark.slow
def test_a_job_that_is_under_way_is_finished_at_the_new_master(
    site: Site, settings: Settings, start_worker: StartWorker
) -> None:
    start_worker("slow")
    texts = [f"text {i} " + "word " * 60 for i in range(40)]
    job = enqueue_embeddings(texts, hardware="slow", chunk_size=2, settings=settings)
    states = []
    waiting = threading.Thread(target=lambda: states.append(job.wait(timeout=120).state), daemon=True)
    waiting.start()
    eventually(lambda: job.status().chunks_done > 2)
    site.fail_over()
    waiting.join(120)
    assert states == [JobState.COMPLETED]
    assert job.vectors().shape == (40, 16)


def test_a_replica_says_so_and_keeps_no_connection(site: Site, settings: Settings) -> None:
    broker = Broker.shared(settings)
    job = enqueue_embeddings(["one"], settings=settings)
    broker.tickets.close()  # it is asked for nothing here
    site.new.replicaof("NO", "ONE")  # two that follow each other try for a minute, and each try is a connection
    site.old.replicaof("127.0.0.1", site.to_new.port)  # and the name does not follow
    eventually(lambda: site.old.info("replication").get("master_link_status") == "up")
    for ask in (lambda: broker.jobs.cancel(job.id), lambda: broker.jobs.drop_input(job.id, 0)):
        broker.connection.now_ms()
        before = _by_name(site)
        with pytest.raises(BrokerUnavailable, match=r"READONLY|read only") as raised:
            ask()
        assert not isinstance(raised.value, BrokerRefused)
        # Redis sees the end of a connection a moment later.
        eventually(partial(_are_closed, site, before), show=lambda: str(site.old.client_list()))
    site.name.lead_to(site.new_socket)
    assert broker.jobs.cancel(job.id) is JobState.CANCELLED


def _are_closed(site: Site, before: set[str]) -> bool:
    return not before & _by_name(site)


def _by_name(site: Site) -> set[str]:
    """The ids of client connections to the old master, without the test's own and those of replication."""
    own = str(site.old.client_id())
    return {each["id"] for each in site.old.client_list() if each["id"] != own and each["flags"] not in ("M", "S")}
