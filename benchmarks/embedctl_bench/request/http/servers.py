"""The servers: ours with a worker and a private Redis, the same engine in the server's process, and infinity's."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from embedctl.child import guarded
from embedctl.local import local_worker, private_redis
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import config_text
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.environments import python_of
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS, format_cpus

GATEWAY, DIRECT, INFINITY = "gateway", "direct", "infinity"
#: The environment of infinity's server.
INFINITY_SERVER = "infinity-server"
_START_S = 300
_STOP_S = 30
_URL = re.compile(r"http://127\.0\.0\.1:\d+")


@dataclass(frozen=True, slots=True)
class Site:
    """Where the servers run, and with what.

    Attributes:
        model: its folder, whose name is the model's.
        place: the folder of the peers' environments.
        folder: of logs and of the private Redis.
    """

    settings: Settings
    hardware: str
    model: Path
    cpus: Sequence[int]
    place: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        label: for people.
    """

    name: str
    label: str
    url: str
    versions: Mapping[str, str]


@contextmanager
def gateway(site: Site) -> Iterator[Server]:
    """`embedctl gateway` beside a worker, as `embedctl up --gateway` runs them, on all CPUs together.

    Raises:
        Unavailable: it does not start.
        WorkerError: Redis or the worker do not start.
    """
    config = site.folder / "embedctl.toml"
    entry = {name: value for name, value in asdict(site.settings.hardware_class(site.hardware)).items() if value}
    config.write_text(config_text(site.model, str(site.place / "cache"), site.hardware, entry), encoding="utf-8")
    with _no_other_settings(config), ExitStack() as stack:
        settings = stack.enter_context(private_redis(load_settings(), site.folder))
        cpus = format_cpus(frozenset(site.cpus))
        log = site.folder / "worker.log"
        stack.enter_context(
            local_worker(settings, hardware=site.hardware, model=site.model.name, cpus=cpus, log_file=log)
        )
        variables = {"EMBEDCTL_REDIS_URL": settings.redis_url, "EMBEDCTL_HARDWARE": site.hardware}
        variables["EMBEDCTL_GATEWAY_TIMEOUT_S"] = "600"  # on few CPUs, large requests take longer than a minute
        command = [sys.executable, "-m", "embedctl_gateway", "--port", "0"]
        url = stack.enter_context(_child(command, site.folder / "gateway.log", variables))
        found = {name: version(name) for name in ("embedctl", "starlette", "uvicorn", "celery", "redis")}
        yield Server(GATEWAY, f"embedctl gateway, class {site.hardware}", url, found)


@contextmanager
def direct(site: Site) -> Iterator[Server]:
    """The same engine in the server's process.

    Raises:
        Unavailable: it does not start.
    """
    options = {
        "threads": len(site.cpus),
        "chunk": site.settings.chunk_size,
        "cache": str(site.place / "cache"),
        "hardware": site.hardware,
        "entry": asdict(site.settings.hardware_class(site.hardware)),
    }
    facts = {"model": str(site.model), "name": site.model.name, "options": options}
    command = [sys.executable, "-m", "embedctl_bench.request.http.direct", json.dumps(facts)]
    with _child(command, site.folder / "direct.log", {SPIN_VARIABLE: SPINS}) as url:  # as a worker has it
        found = {name: version(name) for name in ("embedctl", "starlette", "uvicorn")}
        yield Server(DIRECT, f"the same engine in the server's process, class {site.hardware}", url, found)


@contextmanager
def infinity(site: Site) -> Iterator[Server]:
    """infinity's own server at its defaults, on torch; without BetterTransformer, which its transformers lack.

    Raises:
        Unavailable: it can't be installed, or does not start.
    """
    python = python_of(INFINITY_SERVER, site.place)
    port = _free_port()
    command = [str(python.with_name("infinity_emb")), "v2", "--model-id", str(site.model), "--port", str(port)]
    command += ["--served-model-name", site.model.name, "--engine", "torch", "--device", "cpu", "--host", "127.0.0.1"]
    command += ["--no-bettertransformer", "--url-prefix", "/v1"]
    variables = {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with _child(command, site.folder / "infinity.log", variables, url):
        names = ("infinity_emb", "torch", "transformers", "sentence-transformers", "fastapi", "uvicorn")
        yield Server(INFINITY, "infinity's server, torch", url, _versions(python, names))


#: By turns in this order.
SERVERS = {GATEWAY: gateway, DIRECT: direct, INFINITY: infinity}


@contextmanager
def _child(command: Sequence[str], log: Path, variables: Mapping[str, str], url: str = "") -> Iterator[str]:
    """A server's process, which ends when this one does; gives its URL when it answers.

    Args:
        url: where it will be; else it says it itself.

    Raises:
        Unavailable: it ends, or does not answer in time.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            guarded(command), env={**os.environ, **variables}, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_S
        while not (url := url or _said(log)) or not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
                raise Unavailable(f"{Path(command[0]).name} does not answer: {' / '.join(last)}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _said(log: Path) -> str:
    found = _URL.search(log.read_text(encoding="utf-8", errors="replace"))
    return found[0] if found else ""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:  # noqa: S310  (our own machine)
            return bool(json.load(answer)["data"])
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    code = (
        f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names!r}}}))"
    )
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return found


@contextmanager
def _no_other_settings(config: Path) -> Iterator[None]:
    """The user's settings are out of the way, so that the product is measured as it comes."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("EMBEDCTL_")]:
        del os.environ[name]
    os.environ |= {"EMBEDCTL_CONFIG": str(config), "XDG_CONFIG_HOME": str(config.parent)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
