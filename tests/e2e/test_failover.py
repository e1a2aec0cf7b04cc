"""A host name leads to one master, then to another. Clients with connections to the old master follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis as redis_py

from embedctl import JobState, enqueue_embeddings
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.jobs import assert_encoded
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


def test_all_follow_the_name_to_the_new_master(site: Site, settings: Settings, start_worker: StartWorker) -> None:
    worker = start_worker("slow")
    texts = [f"text {i} " + "word " * 60 for i in range(20)]
    job = enqueue_embeddings(texts, hardware="slow", chunk_size=2, settings=settings)
    states = []
    waiting = threading.Thread(target=lambda: states.append(job.wait(timeout=120).state), daemon=True)
    waiting.start()
    eventually(lambda: job.status().chunks_done > 2)
    site.fail_over()
    waiting.join(120)
    assert states == [JobState.COMPLETED]
    assert_encoded(job, texts)
    after = enqueue_embeddings(["three", "four", "five"], hardware="slow", chunk_size=1, settings=settings)
    assert after.wait(timeout=60).state is JobState.COMPLETED
    assert site.new.exists(keys.job(after.id))
    assert worker.process.poll() is None
