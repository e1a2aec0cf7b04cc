"""What our scripts start: a private Redis, workers without a model, and processes with the code of a checkout."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from embedctl.operating.local import local_worker, private_redis
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import toml
from embedctl_bench.peers.child import ChildProcess
from embedctl_config.cpu import cpu_name
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

#: What a probe has measured, by names that tell the unit.
Figures = dict[str, float]
ROOT = Path(__file__).parents[2]
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
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ec-")))
        dummy: dict[str, Any] = {"backend": "dummy", "options": {"dim": dim, "seconds_per_batch": seconds_per_batch}}
        if token_budget:
            dummy["token_budget"] = token_budget
        file = folder / "embedctl.toml"
        file.write_text(toml({**config, "classes": {DUMMY: dummy, **(classes or {})}}), encoding="utf-8")
        os.environ["EMBEDCTL_CONFIG"] = str(file)
        plain = load_settings(model=DUMMY, hardware=DUMMY)
        made = Service(stack.enter_context(private_redis(plain, folder))[0], folder)
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


def cpu_s_of(pid: int) -> float:
    """The seconds of CPUs that a process has taken, without its children."""
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def seconds_of(work: Callable[[], object]) -> float:
    """How long some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
