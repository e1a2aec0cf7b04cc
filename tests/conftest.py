"""A real Redis for every test that wants one: started here, on a unix socket of its own, ended by pid."""

from __future__ import annotations

import functools
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import redis as redis_py
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from embedctl import routing
from embedctl.acl import ADMIN, access_list, read_passwords
from embedctl.broker import Broker
from embedctl.local import _redis_server
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from tests.hardware import pytest_runtest_setup, pytest_terminal_summary  # noqa: F401  (hooks of the whole suite)

if TYPE_CHECKING:
    from tests.tiny_models import Tiny

CONFIG = Path(__file__).parent.parent / "config" / "embedctl_config" / "redis.conf"

# Where tests run in the background of a shell, Ctrl-C is ignored, and would be by every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine takes its time with any example.
hypothesis_settings.register_profile(
    "patient", hypothesis_settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("patient")

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
    binary: str = ""
    passwords: Mapping[str, str] = field(default_factory=dict)

    #: Those with an access list, by the URL of its producer.
    restricted: ClassVar[dict[str, RedisServer]] = {}

    @property
    def url(self) -> str:
        """For a test's own looks: with an access list, as the user who may do everything."""
        return self.url_of(ADMIN)

    def url_of(self, user: str) -> str:
        """As a user of the access list; one URL for all where there is none."""
        login = f"{user}:{self.passwords[user]}@" if self.passwords else ""
        return f"unix://{login}{self.folder}/redis.sock"

    def restrict(self, *, redis_7: bool = False) -> None:
        """From its next start on, let in only the users of `embedctl config acl`."""
        passwords, _ = read_passwords(self.folder / "passwords")
        users = self.folder / "users.acl"
        users.write_text(access_list(passwords, database=0, redis_7=redis_7))
        self.passwords = {user: each[0] for user, each in passwords.items()}
        self.extra = [*self.extra, "--aclfile", str(users)]
        self.restricted[self.url_of("producer")] = self

    def start(self) -> None:
        command = [self.binary or _redis_server(), str(CONFIG), "--port", "0", "--dir", str(self.folder)]
        command += ["--unixsocket", f"{self.folder}/redis.sock", *self.extra]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        client = redis_py.Redis.from_url(self.url)
        deadline = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis_py.exceptions.ConnectionError:
                runs = self.process.poll() is None and time.monotonic() < deadline
                assert runs, (self.folder / "redis.log").read_text()[-2000:]
                time.sleep(0.02)
        client.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.process = None


def as_user(environment: Mapping[str, str], user: str) -> dict[str, str]:
    """A producer's environment for a process that is another user of its Redis; for all the same without a list."""
    server = RedisServer.restricted.get(environment["EMBEDCTL_REDIS_URL"])
    return {**environment, "EMBEDCTL_REDIS_URL": server.url_of(user)} if server else dict(environment)


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """What a process says once and then every minute, each test may hear at once."""
    routing.reminder.cache_clear()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def free_port() -> int:
    """A port on loopback at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test builds for a model the others find; nothing is written into the home folder."""
    return tmp_path_factory.mktemp("cache")


@contextmanager
def emptied(server: RedisServer) -> Iterator[None]:
    """A Redis without what earlier tests left there. At the end it has denied nothing that this one asked for."""
    client = redis_py.Redis.from_url(server.url)
    client.flushall()
    client.acl_log_reset()
    yield
    # Clients introduce themselves with CLIENT SETINFO, and `doctor` asks for CONFIG; both do without.
    denied = [each for each in client.acl_log() if not each["object"].startswith(("client", "config"))]
    client.close()
    assert not denied


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--acl", action="store_true", help="run producers and workers as the users of `embedctl config acl`"
    )


@pytest.fixture(scope="session")
def shared_redis(pytestconfig: pytest.Config) -> Iterator[RedisServer]:
    """One Redis for the whole run; tests get it empty through `redis`."""
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    server = RedisServer(folder)
    if pytestconfig.getoption("--acl"):
        server.restrict()
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> Iterator[RedisServer]:
    """The run's own Redis, emptied: it was started here and holds nothing of anybody else's."""
    with emptied(shared_redis):
        yield shared_redis


@pytest.fixture
def own_redis(short_folder: Path) -> Iterator[RedisServer]:
    """A Redis that a test may do with as it likes."""
    folder = short_folder / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    yield server
    server.stop()


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


@pytest.fixture(scope="session")
def plain_graph(tiny_model: Callable[[Tiny], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX graph of the small model of TensorRT's tests, in fp32."""
    from embedctl_config.hardware import ModelEntry
    from embedctl_workers.backends.onnx.export import export_own
    from embedctl_workers.backends.onnx.inputs import GRAPH
    from embedctl_workers.models.files import resolve_model
    from tests.tensorrt_models import TINY

    folder = tmp_path_factory.mktemp("plain")
    export_own(resolve_model("tiny", ModelEntry(str(tiny_model(TINY)))), folder)
    return folder / GRAPH


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis_py.Redis]:
    """A bare client, to look at Redis behind the store's back."""
    client = redis_py.Redis.from_url(redis_server.url)
    yield client
    client.close()
