"""Everything that a run starts: Redis, a proxy in front of it, workers with a keeper that restarts them, and every
other process. All of it belongs to the harness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis as redis_py

from embedctl.queueing.broker import Broker
from embedctl.store import WorkerRow
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from tests.chaos.options import DUMMY, Options
from tests.support.chunk_place import ChunkPlace
from tests.support.limits import settings_of
from tests.support.processes import before_all_else, children, free_ports
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer
from tests.support.sentinels import Instance, Site
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
#: Errors that the harness's own requests to Redis may raise while faults break Redis.
OUTAGE = (BrokerUnavailable, redis_py.exceptions.RedisError, OSError)
RESTART_AFTER_S = 1.0
STOP_S = 90.0
DIM = 16
#: The tenant of jobs that are damaged, which nobody ordered.
DAMAGED = "damaged"
#: The class whose workers are those of `embedctl up`.
GUARDED = "guarded"

#: `hang_s` is short because some poison records hang.
_CLASSES = f"""
hardware = "quick"
model = "dummy"
hang_s = 3.0

[classes.quick]
backend = "dummy"
token_budget = 512
options = {{dim = {DIM}, poison = true}}

[classes.slow]
backend = "dummy"
token_budget = 64
options = {{dim = {DIM}, seconds_per_batch = 0.02, poison = true}}

[classes.{GUARDED}]
backend = "dummy"
token_budget = 512
workers_per_device = 2
options = {{dim = {DIM}, seconds_to_load = 1.0, poison = true}}
"""

#: A replacement in the configuration that leaves a worker no memory for any batch, whatever the text.
_SICK = ("poison = true", "poison = true, memory_tokens = 1")

#: Links to Redis: direct, through the proxy that faults break, with high latency, and through a gateway, which knows no
#: other tenant than the usual one.
NEAR, PROXY, FAR, GATEWAY = "near", "proxy", "far", "gateway"
_FAR_S = 0.02


@dataclass(frozen=True)
class Death:
    """The end of a worker process: its exit status, and whether the harness had sent it a deadly signal."""

    status: int
    ours: bool


@dataclass(eq=False)
class Worker:
    """A slot for a worker. The keeper starts its process again whenever it dies."""

    number: int
    hardware: str
    model: str
    cpus: str | None
    link: str
    log_file: Path
    #: The module that runs it, and its arguments before the others. That of GUARDED has workers as children.
    command: Sequence[str] = ("embedctl_workers",)
    process: subprocess.Popen[bytes] | None = None
    restart_at: float = 0.0
    frozen: bool = False
    #: Whether it is short of memory or of another resource.
    short: bool = False
    doomed: bool = False
    deaths: list[Death] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def among(self, rows: Mapping[int, WorkerRow]) -> list[WorkerRow]:
        """The registry's rows of its process, or of the processes that it supervises."""
        return [rows[pid] for pid in (self.pid, *children(self.pid)) if pid in rows]

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this slot's process, if it runs. No other process can have its pid: only we reap it."""
        process = self.process
        if process is None or process.poll() is not None:
            return False
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.frozen = number is signal.SIGSTOP
        else:
            self.doomed = True
        process.send_signal(number)
        return True


class Watch(ABC):
    """Looks at a stack again and again, in a thread."""

    poll_s = 0.25
    stack: Stack

    def start(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    @abstractmethod
    def look(self) -> None:
        """Look once. An OUTAGE ends this look only."""

    def _run(self) -> None:
        while not self._stop.wait(self.poll_s):
            with suppress(*OUTAGE):
                self.look()


class Stack:
    """Everything that a run starts."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        #: Two instances and their sentinels; None where Redis is a single one.
        self.site = Site(folder) if options.sentinels else None
        if self.site is None:
            (port,) = free_ports(1)
            self.redis = RedisServer(folder, extra=["--bind", "127.0.0.1", "--port", str(port)])
            self.direct_url = f"redis://127.0.0.1:{port}/0"
        else:
            port, self.redis = self.site.instances[0].port, self.site.instances[0].server
            self.direct_url = self.site.url
        self.proxy = Proxy(port)
        self._links = {PROXY: self.proxy, FAR: Proxy(port, delay_s=_FAR_S)}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []
        #: The gateway, and where it listens.
        self.gateway: subprocess.Popen[bytes] | None = None
        (self._gateway_port,) = free_ports(1)
        self.redis_up = False
        self.redis_full = False
        self.redis_restarts: list[float] = []
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._write_config()
        self._limits = before_all_else(folder, "limits", "")["PYTHONPATH"]
        self.chunk_place = ChunkPlace(options.chunk_files, folder)
        self.settings: Settings = settings_of(self.environment(self.redis.url if self.site is None else self.site.url))
        self.broker = Broker.connect(self.settings)
        self._open_raw()

    def _open_raw(self) -> None:
        # A request to a stopped Redis ends as an OUTAGE. Typed as Any: redis-py's own return types are unions of its
        # sync and async forms.
        self.raw: Any = redis_py.Redis.from_url(self.redis.url, socket_timeout=10)

    def start(self) -> None:
        """Start Redis, the proxy and all workers, and wait until they are ready."""
        self.start_redis()
        for link in self._links.values():
            link.start()
        cpus = sorted(os.sched_getaffinity(0))
        real = self.options.model != DUMMY
        for number in range(self.options.workers):
            self.workers.append(
                Worker(
                    number=number,
                    hardware="cpu" if real else ("slow", "quick")[number % 2],
                    model=self.options.model,
                    cpus=str(cpus[number % len(cpus)]) if real else None,
                    link=PROXY if number % 3 == 2 or (real and number % 2 == 1) else NEAR,
                    log_file=self.folder / f"worker-{number}.log",
                )
            )
        if len(self.workers) > 1 and not real:
            log_file = self.folder / "worker-other.log"
            other = Worker(len(self.workers), "quick", DUMMY, None, NEAR, log_file, ("tests.chaos.other_worker",))
            self.workers.append(other)
        if self.options.supervised:
            log_file = self.folder / "up.log"
            up = Worker(len(self.workers), GUARDED, DUMMY, None, PROXY, log_file, ("embedctl", "up"))
            self.workers.append(up)
        for worker in self.workers:
            self._start_worker(worker)
        self._keeper.start()
        if self.options.gateway:
            self.start_gateway()
        self.wait_until_ready()

    def start_gateway(self) -> None:
        command = ["embedctl", "gateway", "--address", str(self._gateway_port)]
        self.gateway = self.spawn(command, log_file=self.folder / "gateway.log")

    @property
    def sick_config(self) -> Path:
        """The configuration file of workers that can encode nothing."""
        return self.folder / "sick.toml"

    def cut_links(self) -> None:
        """Close every connection through a proxy. Otherwise a half-open connection stays open at its other end."""
        for link in self._links.values():
            link.cut()

    @property
    def classes(self) -> list[str]:
        """The hardware classes that are served."""
        return sorted({worker.hardware for worker in self.workers})

    def environment(self, url: str) -> dict[str, str]:
        """The environment that lets a process find this run's Redis and classes, without the user's own settings."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_")}
        return {
            **own,
            **self.chunk_place.environment,
            "EMBEDCTL_REDIS_URL": url,
            "EMBEDCTL_CONFIG": str(self.folder / "embedctl.toml"),
            "EMBEDCTL_STATE_DIR": str(self.folder / "state"),
            "EMBEDCTL_CACHE_DIR": str(self.folder / "cache"),
            "XDG_CONFIG_HOME": str(self.folder / "nothing"),
            # The source tree of this harness, whichever version is installed.
            "PYTHONPATH": os.pathsep.join(
                map(str, (self._limits, *(ROOT / name for name in ("config", "producer", "workers"))))
            ),
        }

    def spawn(
        self,
        command: list[str],
        *,
        log_file: Path,
        link: str = NEAR,
        variables: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a Python module as a process, in its own session.

        Args:
            link: the link that it uses to reach Redis.
            variables: environment variables that extend or override the run's.
        """
        url = self._links[link].url if link in self._links else self.direct_url
        of_link = {"EMBEDCTL_URL": f"http://127.0.0.1:{self._gateway_port}", "EMBEDCTL_CHUNK_FILES": ""}
        environment = {**self.environment(""), **of_link} if link == GATEWAY else self.environment(url)
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**environment, **(variables or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log if stderr is None else stderr,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_redis(self) -> None:
        if self.site is None:
            self.redis.start()
        else:
            self.site.start()
        self._redis_is_up()

    def lead_to(self, master: Instance) -> None:
        """Go on at another master: a host name leads there from now on, and the harness' own requests go there."""
        self.redis = master.server
        for link in self._links.values():
            link.lead_to(master.port)
        before = self.raw
        self._open_raw()
        before.close()
        self._redis_is_up()

    def _redis_is_up(self) -> None:
        self.redis_restarts.append(time.monotonic())
        self.redis_up = True
        self.redis_full = False

    def stop_redis(self, *, kill: bool) -> None:
        self.redis_up = False
        if kill and self.redis.process is not None:
            self.redis.process.kill()
        self.redis.stop()

    def rows(self) -> dict[int, WorkerRow]:
        """The registry's rows of live workers, by pid."""
        return {row.pid: row for row in self.broker.workers.alive()}

    def owners(self) -> set[str]:
        """The worker instances that own chunks."""
        jobs = [name.decode() for name in self.raw.zrange(keys.ACTIVE, 0, -1)]
        return {owner.split(b" ")[1].decode() for job_id in jobs for owner in self.raw.hvals(keys.owners(job_id))}

    def deaths(self) -> Iterator[Death]:
        for worker in self.workers:
            yield from worker.deaths

    def wait_until_ready(self) -> None:
        """Wait until every worker's process is alive and has reported itself."""

        def ready() -> bool:
            with suppress(*OUTAGE):
                rows = self.rows()
                return all(worker.alive and worker.among(rows) for worker in self.workers)
            return False

        eventually(ready, what="the workers' start", show=lambda: f"their logs are in {self.folder}")

    def stop_workers(self) -> list[int]:
        """Stop every worker as an operator does, and the gateway. Return their exit statuses, the gateway's last."""
        self._stopping.set()
        self._keeper.join()
        for worker in self.workers:
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
        processes = [worker.process for worker in self.workers]
        if self.gateway is not None:
            self.gateway.terminate()
            processes.append(self.gateway)
        return [end_of(process) for process in processes if process is not None]

    def close(self) -> None:
        """Kill everything that still runs."""
        self._stopping.set()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.broker.close()
        self.raw.close()
        for link in self._links.values():
            if link.port:
                link.stop()
        if self.site is None:
            self.redis.stop()
        else:
            self.site.stop()
        self.chunk_place.stop()

    def survivors(self) -> list[int]:
        """Processes that still run and descend from this run, recognised by their environment."""
        mark = str(self.folder).encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                known = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in known and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        return found

    def _start_worker(self, worker: Worker) -> None:
        command = [*worker.command, "--class", worker.hardware, "--model", worker.model]
        command += ["--cpus", worker.cpus] if worker.cpus is not None else []
        worker.frozen = worker.short = worker.doomed = False
        worker.process = self.spawn(command, log_file=worker.log_file, link=worker.link)

    def _keep(self) -> None:
        """Restart every worker about a second after it died."""
        while not self._stopping.wait(0.1):
            for worker in self.workers:
                process = worker.process
                if process is None:
                    if time.monotonic() >= worker.restart_at:
                        self._start_worker(worker)
                elif process.poll() is not None:
                    worker.deaths.append(Death(process.returncode, worker.doomed))
                    worker.restart_at = time.monotonic() + RESTART_AFTER_S
                    worker.process = None

    def _write_config(self) -> None:
        lease = self.options.lease_s
        times = "" if lease is None else f"lease_s = {float(lease)}\n"
        classes = _CLASSES if self.options.model == DUMMY else ""
        (self.folder / "embedctl.toml").write_text(times + classes, encoding="utf-8")
        self.sick_config.write_text(times + classes.replace(*_SICK), encoding="utf-8")


def end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that was asked to end, and kill it where it does not. Return its exit status."""
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
