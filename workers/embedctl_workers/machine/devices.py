"""Pin this process to CPUs, a GPU or a Neuron core, before anything sizes a thread pool or opens a device."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embedctl_config.errors import SettingsError, WorkerError
from embedctl_workers.machine.cgroup import cpu_quota

#: What OpenMP, MKL, OpenBLAS and the tokenizers' thread pool read as they load.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
#: How often GNU OpenMP's threads look for work before they sleep. Its own 300,000 take milliseconds, in which they hold
#: back whatever else wants the CPU: beside another process, two threads were 2 to 10 times slower (docs/tuning.md).
SPIN_VARIABLE, _SPINS = "GOMP_SPINCOUNT", "1000"
#: Unless this is 1 as it loads, onnxruntime tells its maker what it runs, and numbers this machine in the home folder.
SILENCE_VARIABLE = "ORT_DISABLE_TELEMETRY"
_SIZES_THREADS_AT_IMPORT = ("torch", "numpy", "onnxruntime", "tokenizers")
_SPAN = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
#: What restricts a process to some devices of a kind; read by the vendors' libraries as they open them.
VISIBLE_VARIABLES = {"gpu": "CUDA_VISIBLE_DEVICES", "neuron": "NEURON_RT_VISIBLE_CORES"}
#: What ROCm's runtime reads, which takes UUIDs, and then HIP, which numbers what the former leaves.
ROCM_VARIABLE, HIP_VARIABLES = "ROCR_VISIBLE_DEVICES", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU or a Neuron core.

    Attributes:
        index: the number that people call it by: what `nvidia-smi` shows, or the core's.
        uid: what selects it: a GPU's UUID, which stays the same when others are hidden, or the core's number.
        name: its model, for people.
        node: the NUMA node that it is near; None where that can't be told.
        rocm: whether it is an AMD GPU.
    """

    kind: Literal["gpu", "neuron"]
    index: int
    uid: str
    name: str = ""
    node: int | None = None
    rocm: bool = False

    def hide_others(self) -> None:
        """Let what opens devices in this process from now on see this one alone."""
        if self.rocm:
            for variable in HIP_VARIABLES:
                os.environ.pop(variable, None)
            os.environ[ROCM_VARIABLE] = self.uid
        else:
            os.environ[VISIBLE_VARIABLES[self.kind]] = self.uid


@dataclass(frozen=True, slots=True)
class Pinned:
    """What this process runs on.

    Attributes:
        cpus: those that its threads may use.
        threads: compute threads: one a physical core, within the cgroup's quota, unless it was told otherwise.
        accelerator: the only one that it sees; None for a worker of CPUs.
    """

    cpus: frozenset[int]
    threads: int
    accelerator: Accelerator | None = None

    @property
    def label(self) -> str:
        """The device as the worker's name has it: CPUs such as `0-3,8`, or an accelerator's number."""
        return self.cpu_list if self.accelerator is None else str(self.accelerator.index)

    @property
    def device(self) -> str:
        """The device in full: `cpu 0-3`, `gpu GPU-…` or `neuron 0`."""
        return f"cpu {self.cpu_list}" if self.accelerator is None else f"{self.accelerator.kind} {self.accelerator.uid}"

    @property
    def cpu_list(self) -> str:
        """The CPUs as people write them, such as `0-3,8`."""
        return format_cpus(self.cpus)


def pin(cpus: str | None, *, accelerator: Accelerator | None = None, threads: int | None = None) -> Pinned:
    """Restrict this process to CPUs, and to one accelerator if there is one, and set its thread counts.

    Args:
        cpus: such as `0-3` or `0,2`; None for all that it may use.
        threads: compute threads; one a physical core, within the cgroup's quota, where None.

    Raises:
        SettingsError: that is no list of CPUs, or some of them are not to be had, or they are fewer than the threads.
        WorkerError: something that sizes its thread pool at import is imported already.
    """
    chosen = usable_cpus(cpus)
    if threads is not None and threads > len(chosen):
        raise SettingsError(f"--threads {threads}: there are only the CPUs {format_cpus(chosen)} to run them on")
    if too_early := [name for name in _SIZES_THREADS_AT_IMPORT if name in sys.modules]:
        raise WorkerError(f"{', '.join(too_early)} was imported before the worker was pinned")
    threads = threads or thread_count(chosen)
    os.sched_setaffinity(0, chosen)
    if accelerator is not None:
        accelerator.hide_others()
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    os.environ.setdefault(SPIN_VARIABLE, _SPINS)
    os.environ.setdefault(SILENCE_VARIABLE, "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    return Pinned(chosen, threads, accelerator)


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


def thread_count(cpus: set[int] | frozenset[int]) -> int:
    """Compute threads for a set of CPUs: its physical cores, but no more than the cgroup's quota pays for."""
    return max(1, int(min(len(cores_of(cpus)), cpu_quota())))


def cores_of(cpus: set[int] | frozenset[int]) -> list[frozenset[int]]:
    """The physical cores of a set of CPUs, each with those of its hyper-threads that are in the set, in order."""
    cores: dict[tuple[str, str], set[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(_core_of(cpu), set()).add(cpu)
    return [frozenset(core) for core in cores.values()]


def parse_cpus(text: str, source: str = "--cpus") -> set[int]:
    """`0-3,8` as a set.

    Args:
        source: where the text comes from, for the message.

    Raises:
        SettingsError: it is not of that form.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        found = _SPAN.fullmatch(part.strip())
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not span:
            raise SettingsError(f"{source} {text!r} is no list of numbers such as 0-3 or 0,2")
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
