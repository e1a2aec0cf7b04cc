"""Two gateways and a worker, which are killed and started again at random moments."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx2

from tests.support.forked import Forked
from tests.support.gateway import NO_TLS
from tests.support.processes import free_ports
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually

#: Time from one kill to the next, and how long what was killed stays away (seconds).
_BETWEEN_S, _AWAY_S = (0.3, 2.0), (0.0, 1.5)


class Child:
    """A process that is started again after a kill."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self._make = partial(Forked, arguments, environment, None, log, log)
        self.start()

    def start(self) -> None:
        self.process = self._make()


def kill(killed: Child | RedisServer) -> None:
    assert killed.process is not None
    killed.process.kill()
    killed.process.wait()


def kill_by_turns(draw: random.Random, doomed: Sequence[Child | RedisServer]) -> None:
    """Kill one after the other, and start it again, each at a random moment."""
    for each in doomed:
        time.sleep(draw.uniform(*_BETWEEN_S))
        kill(each)
        time.sleep(draw.uniform(*_AWAY_S))
        each.start()


@contextmanager
def stack(environment: dict[str, str], folder: Path) -> Iterator[tuple[list[str], dict[str, Child]]]:
    """Gives the gateways' URLs, and all processes by name."""
    own = {**environment, "EMBEDCTL_HARDWARE": "auto", "EMBEDCTL_CHUNK_SIZE": "10"}
    ports = free_ports(2)
    commands = {f"gateway-{port}": ["gateway", "--address", str(port)] for port in ports}
    commands["worker"] = ["worker", "--class", "dummy", "--model", "dummy"]
    children = {name: Child(command, own, folder / f"{name}.log") for name, command in commands.items()}
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        until_all_serve(urls)
        yield urls, children
    finally:
        for child in children.values():
            kill(child)


def until_all_serve(urls: list[str]) -> None:
    """Wait until each gateway knows a worker."""
    eventually(lambda: all(map(_serves, urls)), what="the gateways' and the worker's start")


def _serves(url: str) -> bool:
    with suppress(httpx2.TransportError):
        return bool(httpx2.get(f"{url}/ready", timeout=60, verify=NO_TLS).status_code == 200)
    return False
