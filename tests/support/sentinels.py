"""A master, a replica and three sentinels, all on free ports of this machine."""

from __future__ import annotations

import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import redis as redis_py

from embedctl.operating.local import _redis_server
from tests.support.processes import free_ports
from tests.support.redis_server import CONFIG, RedisServer
from tests.support.waiting import PATIENCE_S, eventually

#: The name of the master at the sentinels.
MASTER = "embedctl"
#: After how long a silent master counts as down at a sentinel (ms).
_DOWN_AFTER_MS = 1000


@dataclass
class Instance:
    """One of the two that can be the master."""

    server: RedisServer
    port: int

    @cached_property
    def client(self) -> redis_py.Redis:
        return redis_py.Redis.from_url(self.server.url, socket_timeout=5)  # a stopped one is asked too

    def send_signal(self, number: int) -> None:
        assert self.server.process is not None
        self.server.process.send_signal(number)

    def replication(self) -> dict[str, Any]:
        """What it says of its replication; nothing while it is away.

        Sentinels that change its role end its connections, so a question may be cut off at that moment.
        """
        try:
            return self.client.info("replication")
        except (redis_py.exceptions.ConnectionError, redis_py.exceptions.TimeoutError):
            return {}

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        assert self.server.process is not None
        self.server.process.wait(PATIENCE_S)
        self.server.process = None


@dataclass
class Site:
    """Two instances of Redis and their sentinels, who agree by two of three.

    The sentinels ask for `password`, unless it is empty.
    """

    folder: Path
    password: str = ""
    instances: list[Instance] = field(init=False)
    ports: list[int] = field(init=False)
    _sentinels: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        *self.ports, first, second = free_ports(5)
        self.instances = [self._instance(port) for port in (first, second)]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{MASTER}/0"

    def _instance(self, port: int) -> Instance:
        folder = self.folder / str(port)
        folder.mkdir()
        extra = ["--port", str(port), "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"]
        own_config = folder / "redis.conf"  # sentinels have it rewritten
        shutil.copy(CONFIG, own_config)
        return Instance(RedisServer(folder, extra=extra, config=own_config), port)

    def start(self) -> None:
        first, second = self.instances
        first.server.start()
        second.server.start()
        second.client.replicaof("127.0.0.1", first.port)
        eventually(self.in_step, what="the replica's first copy")
        for port in self.ports:
            self._start_sentinel(port, first.port)
        eventually(self._know_each_other, what="the agreement of the sentinels")

    def in_step(self) -> bool:
        """Whether one instance follows the other."""
        said = [each.replication() for each in self.instances]
        return all(said) and sorted(each.get("master_link_status", "none") for each in said) == ["none", "up"]

    def _start_sentinel(self, port: int, master: int) -> None:
        config = self.folder / f"sentinel-{port}.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self.folder}\nlogfile {config.with_suffix('.log')}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {master} 2\n"
            f"sentinel down-after-milliseconds {MASTER} {_DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {MASTER} 5000\n" + (f"requirepass {self.password}\n" if self.password else "")
        )
        self._sentinels.append(subprocess.Popen([_redis_server(), str(config), "--sentinel"]))

    def sentinel(self, port: int) -> redis_py.Redis:
        return redis_py.Redis(port=port, password=self.password or None)

    def _know_each_other(self) -> bool:
        for port in self.ports:
            with suppress(redis_py.exceptions.ConnectionError), self.sentinel(port) as sentinel:
                state = sentinel.sentinel_masters().get(MASTER, {})
                if (state.get("num-other-sentinels"), state.get("num-slaves")) != (2, 1):
                    return False
                continue
            return False
        return True

    @property
    def master(self) -> Instance:
        """The instance that the sentinels name at this moment."""
        with self.sentinel(self.ports[0]) as sentinel:
            _, port = sentinel.sentinel_get_master_addr_by_name(MASTER)
        return next(each for each in self.instances if each.port == int(port))

    @property
    def replica(self) -> Instance:
        master = self.master
        return next(each for each in self.instances if each is not master)

    def has_left(self, old: Instance) -> bool:
        """Whether another instance than `old` is the master."""
        master = self.master
        return master is not old and master.replication().get("role") == "master"

    def wait_for_failover(self, old: Instance) -> None:
        """Wait until another instance than `old` is the master."""
        eventually(lambda: self.has_left(old), what="a failover")

    def part(self) -> None:
        """Have the replica receive nothing more: its master does not know the user that it now comes as."""
        replica = self.replica.client
        replica.config_set("masteruser", "nobody")
        replica.config_set("masterauth", "nothing")
        replica.client_kill_filter(_type="master")

    def forgive(self) -> None:
        """Have every instance come to its master as before."""
        for each in self.instances:
            each.client.config_set("masteruser", "")
            each.client.config_set("masterauth", "")

    def stop(self) -> None:
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait(PATIENCE_S)
        for each in self.instances:
            each.client.close()
            if each.server.process is not None:
                each.kill()
