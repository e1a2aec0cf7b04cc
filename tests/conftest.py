"""A real Redis for every test that wants one: started here, on a unix socket of its own, ended by pid."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis as redis_py

from embedctl.broker import Broker
from embedctl.local import _redis_server
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings

if TYPE_CHECKING:
    from tests.tiny_models import Tiny

CONFIG = Path(__file__).parent.parent / "config" / "embedctl_config" / "redis.conf"

# Where tests run in the background of a shell, Ctrl-C is ignored, and would be by every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Short times, so that what waits for a lease in life waits for a second here.
QUICK = {"lease_s": 1.0, "reissue_s": 1.0}

#: Hardware classes for tests: no model, and as slow as a test needs.
CLASSES = {
    "cpu": HardwareClass(),
    "dummy": HardwareClass(backend="dummy", options={"dim": 16}),
    "slow": HardwareClass(backend="dummy", token_budget=64, options={"dim": 16, "seconds_per_batch": 0.1}),
}


@dataclass
class RedisServer:
    """A redis-server that a test may stop and start again; its data stays in its folder."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    extra: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/redis.sock"

    def start(self) -> None:
        command = [_redis_server(), str(CONFIG), "--port", "0", "--unixsocket", f"{self.folder}/redis.sock"]
        command += ["--dir", str(self.folder), *self.extra]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        client = redis_py.Redis.from_url(self.url)
        deadline = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis_py.exceptions.ConnectionError:
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)
        client.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.process = None


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test builds for a model the others find; nothing is written into the home folder."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """One Redis for the whole run; tests get it empty through `redis`."""
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    server = RedisServer(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """The run's own Redis, emptied: it was started here and holds nothing of anybody else's."""
    client = redis_py.Redis.from_url(shared_redis.url)
    client.flushall()
    client.close()
    return shared_redis


@pytest.fixture
def settings(redis_server: RedisServer) -> Settings:
    return Settings(redis_url=redis_server.url, classes=CLASSES, hardware="dummy", model="dummy", **QUICK)


@pytest.fixture
def broker(settings: Settings) -> Iterator[Broker]:
    broker = Broker.connect(settings)
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tiny], Path]:
    """Makes the folder of a small random model, each once in the whole run."""
    from tests.tiny_models import make_model

    return functools.cache(lambda tiny: make_model(tmp_path_factory.mktemp(tiny.family), tiny))


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis_py.Redis]:
    """A bare client, to look at Redis behind the store's back."""
    client = redis_py.Redis.from_url(redis_server.url)
    yield client
    client.close()
