"""What our scripts start: a private Redis, workers without a model, and processes with the code of a checkout."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from embedctl.operating.local import local_worker
from embedctl.queueing.broker import Broker
from embedctl.store.scripts import script_source
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import configured_redis
from embedctl_bench.peers.child import ChildProcess
from embedctl_config.cpu import cpu_name
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS

#: What a probe has measured, by names that tell the unit.
Figures = dict[str, float]
ROOT = Path(__file__).parents[2]
#: Scripts of jobs, and their names by the digests that Redis knows them by.
SCRIPTS = ("create", "add", "hold", "seal", "next", "ring", "complete", "renew", "reap", "audit", "settle")
_NAMES = {hashlib.sha1(script_source(name).encode()).hexdigest(): name for name in SCRIPTS}  # noqa: S324
#: The size of Redis' own list of slow commands.
_LISTED = 100_000
#: The class of the workers without a model, and the model's name.
DUMMY = "dummy"


@dataclass(frozen=True, slots=True)
class Service:
    """A private Redis, and settings of jobs for workers without a model.

    Attributes:
        folder: of logs and of everything else; it goes with the service.
    """

    settings: Settings
    folder: Path

    def worker(
        self, name: str = "worker", *, hardware: str = DUMMY, model: str = DUMMY
    ) -> AbstractContextManager[object]:
        """A worker that runs until the block ends."""
        log = self.folder / f"{name}.log"
        return local_worker(self.settings, hardware=hardware, model=model, options=[], log_file=log)


@contextmanager
def service(
    *,
    workers: int = 0,
    dim: int = 16,
    seconds_per_batch: float = 0.0,
    token_budget: int = 0,
    classes: Mapping[str, object] | None = None,
    **config: object,
) -> Iterator[Service]:
    """A private Redis, and workers that take so long for a batch of at most so many tokens. Its configuration, with
    more of it, is this process's, and its children's."""
    with ExitStack() as stack:
        dummy: dict[str, Any] = {"backend": "dummy", "options": {"dim": dim, "seconds_per_batch": seconds_per_batch}}
        if token_budget:
            dummy["token_budget"] = token_budget
        configured = {**config, "classes": {DUMMY: dummy, **(classes or {})}}
        made = Service(*stack.enter_context(configured_redis(configured, model=DUMMY, hardware=DUMMY)))
        for number in range(workers):
            stack.enter_context(made.worker(f"worker-{number}"))
        yield made


@contextmanager
def sides(script: str, other: Path | None) -> Iterator[dict[str, ChildProcess]]:
    """A script of ours in a process with this checkout's packages, and one with another's if there is one.

    Their logs are in `build/probes`.

    Raises:
        SystemExit: the other one is no checkout of embedctl.
    """
    checkouts = {"this": ROOT, **({"other": other.resolve()} if other else {})}
    with ExitStack() as stack:
        found = {}
        for name, checkout in checkouts.items():
            parts = [checkout / part for part in ("producer", "gateway", "workers", "config")]
            if not (parts[0] / "embedctl").is_dir():
                sys.exit(f"{checkout} is no checkout of embedctl")
            variables = {"PYTHONPATH": os.pathsep.join(map(str, [*parts, ROOT / "benchmarks", ROOT]))}
            variables[SPIN_VARIABLE] = SPINS  # as in a worker: idle threads of an engine would take CPU time
            # -P: nothing in the working directory comes before these.
            command = [sys.executable, "-P", "-m", script, "--serve"]
            found[name] = ChildProcess(command, variables, ROOT / "build" / "probes" / f"{name}.log")
            stack.callback(found[name].close)
        yield found


def machine_line() -> str:
    """The machine, its load and Python's version."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    cpus = len(os.sched_getaffinity(0))
    return f"{cpu_name()}, {cpus} of {os.cpu_count()} CPUs, Python {platform.python_version()}, load {load}"


@contextmanager
def slow_log(broker: Broker, longer_us: int) -> Iterator[Mapping[str, Sequence[float]]]:
    """How long (µs) each command and script took in Redis that is run in the block and takes longer than `longer_us`,
    by name, when it has ended. Only one such block at a time."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    with broker.connection.client() as client:
        client.config_set("slowlog-max-len", _LISTED)
        client.config_set("slowlog-log-slower-than", longer_us)
        client.slowlog_reset()
        yield found
        client.config_set("slowlog-log-slower-than", -1)
        for each in client.slowlog_get(_LISTED):
            command, *rest = each["command"].decode(errors="replace").split(" ")
            name = _NAMES.get(rest[0], "of kombu") if command.lower() == "evalsha" else command.lower()
            found[name].append(each["duration"])


def cpu_s_of(pid: int) -> float:
    """The seconds of CPUs that a process has taken, without its children."""
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def seconds_of(work: Callable[[], object]) -> float:
    """How long some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
