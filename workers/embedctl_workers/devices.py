"""Find CPUs and pin this process to them, before anything sizes a thread pool."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from embedctl_config.errors import SettingsError, WorkerError

#: What OpenMP, MKL, OpenBLAS and the tokenizers' thread pool read as they load.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
#: How often GNU OpenMP's threads look for work before they sleep. Its own 300,000 take milliseconds, in which they hold
#: back whatever else wants the CPU: beside another process, two threads were 2 to 10 times slower (docs/tuning.md).
SPIN_VARIABLE, _SPINS = "GOMP_SPINCOUNT", "1000"
_SIZES_THREADS_AT_IMPORT = ("torch", "numpy", "onnxruntime", "tokenizers")
_SPAN = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_CPU_INFO = Path("/proc/cpuinfo")
_TELLING = ("model name", "flags", "Features", "CPU implementer", "CPU part")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Pinned:
    """The CPUs that this process runs on, and its compute threads: one a physical core, within the cgroup's quota."""

    cpus: frozenset[int]
    threads: int

    @property
    def label(self) -> str:
        """The CPUs as people write them, such as `0-3,8`."""
        return format_cpus(self.cpus)


def pin(cpus: str | None) -> Pinned:
    """Restrict this process to CPUs and set its thread counts.

    Args:
        cpus: such as `0-3` or `0,2`; None for all that it may use.

    Raises:
        SettingsError: that is no list of CPUs, or some of them are not to be had.
        WorkerError: something that sizes its thread pool at import is imported already.
    """
    chosen = usable_cpus(cpus)
    if too_early := [name for name in _SIZES_THREADS_AT_IMPORT if name in sys.modules]:
        raise WorkerError(f"{', '.join(too_early)} was imported before the worker was pinned")
    threads = thread_count(chosen)
    os.sched_setaffinity(0, chosen)
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    os.environ.setdefault(SPIN_VARIABLE, _SPINS)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    return Pinned(chosen, threads)


def usable_cpus(cpus: str | None) -> frozenset[int]:
    """The CPUs that `--cpus` names, or all that this process may use.

    Raises:
        SettingsError: that is no list of CPUs, or some of them are not to be had.
    """
    allowed = os.sched_getaffinity(0)
    chosen = allowed if cpus is None else parse_cpus(cpus)
    if missing := chosen - allowed:
        raise SettingsError(
            f"--cpus {cpus}: no CPU {format_cpus(missing)} here; this process may use {format_cpus(allowed)}"
        )
    return frozenset(chosen)


def cpu_identity() -> str:
    """What tells this CPU's kind and instruction set from another's: machines may share a cache."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    telling = {line for line in lines if line.startswith(_TELLING)}
    return "\n".join([platform.machine(), *sorted(telling)])


def thread_count(cpus: set[int] | frozenset[int]) -> int:
    """Compute threads for a set of CPUs: its physical cores, but no more than the cgroup's quota pays for."""
    cores = {_core_of(cpu) for cpu in cpus}
    return max(1, int(min(len(cores), _quota())))


def parse_cpus(text: str) -> set[int]:
    """`0-3,8` as a set.

    Raises:
        SettingsError: it is not of that form.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        found = _SPAN.fullmatch(part.strip())
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not span:
            raise SettingsError(f"--cpus {text!r} is no list of CPUs such as 0-3 or 0,2")
        cpus.update(span)
    return cpus


def format_cpus(cpus: set[int] | frozenset[int]) -> str:
    """A set of CPUs as `0-3,8`."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _core_of(cpu: int) -> tuple[str, str]:
    """Package and core of a CPU: hyper-threads share them. A CPU whose topology is hidden counts as a core."""
    topology = _CPU_FOLDER / f"cpu{cpu}" / "topology"
    try:
        package = (topology / "physical_package_id").read_text().strip()
        core = (topology / "core_id").read_text().strip()
    except OSError:
        return ("cpu", str(cpu))
    return (package, core)


def _quota() -> float:
    """CPUs' worth of time that cgroup v2 grants, rounded up; infinite without a quota."""
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else math.ceil(int(quota) / int(period))
