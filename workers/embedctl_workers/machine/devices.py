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

#: OpenMP, MKL, OpenBLAS and the tokenizers' thread pool read these when they load.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
#: How often GNU OpenMP's threads poll for work before they sleep. The default of 300,000 takes milliseconds, and keeps
#: the CPU from everything else: beside another process, two threads were 2 to 10 times slower (docs/tuning.md).
SPIN_VARIABLE, SPINS = "GOMP_SPINCOUNT", "1000"
#: Unless this is 1 when onnxruntime loads, it reports to its vendor what it runs, and writes an id of this machine to
#: the home folder.
SILENCE_VARIABLE = "ORT_DISABLE_TELEMETRY"
#: torch reads the first, and older ones the second, when it first allocates on a GPU. With segments that grow, memory
#: does not fragment although no two batches have the same size.
ALLOCATOR_VARIABLES, _ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
_SIZES_THREADS_AT_IMPORT = ("torch", "numpy", "onnxruntime", "tokenizers")
_SPAN = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
#: The variable that restricts a process to some devices of a kind. The vendors' libraries read it on opening devices.
VISIBLE_VARIABLES = {"gpu": "CUDA_VISIBLE_DEVICES", "neuron": "NEURON_RT_VISIBLE_CORES"}
#: ROCm's runtime reads the first, and accepts UUIDs. HIP then reads the others, and numbers the GPUs that are left.
ROCM_VARIABLE, HIP_VARIABLES = "ROCR_VISIBLE_DEVICES", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU or a Neuron core."""

    kind: Literal["gpu", "neuron"]
    index: int  #: its number for people: the one that `nvidia-smi` shows, or the core's
    uid: str  #: its id for selection: a GPU's UUID, which stays the same when others are hidden, or the core's number
    name: str = ""  #: its model, for people
    node: int | None = None  #: the nearest NUMA node; None if unknown
    rocm: bool = False  #: whether it is an AMD GPU
    memory: int = 0  #: in MiB; 0 if unknown

    def hide_others(self) -> None:
        """Make this the only device that libraries of this process can open from now on."""
        if self.rocm:
            for variable in HIP_VARIABLES:
                os.environ.pop(variable, None)
            os.environ[ROCM_VARIABLE] = self.uid
        else:
            os.environ[VISIBLE_VARIABLES[self.kind]] = self.uid

    def let_segments_grow(self) -> None:
        """Choose torch's way to allocate on NVIDIA's GPUs, unless the user has chosen one."""
        if self.kind == "gpu" and not self.rocm and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            os.environ[ALLOCATOR_VARIABLES[0]] = _ALLOCATOR


@dataclass(frozen=True, slots=True)
class Pinned:
    """The CPUs and the accelerator that this process runs on; a CPU worker has none, and others see no other one.

    `threads` compute: one per physical core, within the cgroup's quota, unless a number was given. `sharing` is how
    many workers share the accelerator, this one included.
    """

    cpus: frozenset[int]
    threads: int
    accelerator: Accelerator | None = None
    sharing: int = 1

    @property
    def label(self) -> str:
        """The device as it appears in the worker's name: CPUs such as `0-3,8`, or an accelerator's number."""
        return self.cpu_list if self.accelerator is None else str(self.accelerator.index)

    @property
    def device(self) -> str:
        """The device in full: `cpu 0-3`, `gpu GPU-…` or `neuron 0`."""
        return f"cpu {self.cpu_list}" if self.accelerator is None else f"{self.accelerator.kind} {self.accelerator.uid}"

    @property
    def places(self) -> tuple[frozenset[int], ...]:
        """The CPUs of each compute thread, if each has a core of its own; else empty."""
        cores = cores_of(self.cpus) if self.accelerator is None else []
        return tuple(cores) if len(cores) == self.threads else ()

    @property
    def cpu_list(self) -> str:
        """The CPUs as people write them, such as `0-3,8`."""
        return format_cpus(self.cpus)


def pin(
    cpus: str | None, *, accelerator: Accelerator | None = None, threads: int | None = None, sharing: int = 1
) -> Pinned:
    """Restrict this process to CPUs, and to one accelerator if one is given, and set its thread counts.

    Args:
        cpus: such as `0-3` or `0,2`; None for all that the process may use.
        threads: compute threads; None for one per physical core, within the cgroup's quota.
        sharing: how many workers share the accelerator, this one included.

    Raises:
        SettingsError: as :func:`usable_cpus`; or `threads` exceeds their number.
        WorkerError: a library that sizes its thread pool at import is imported already.
    """
    chosen = usable_cpus(cpus)
    if threads is not None and threads > len(chosen):
        raise SettingsError(f"--threads {threads}: only the CPUs {format_cpus(chosen)} are available")
    if too_early := [name for name in _SIZES_THREADS_AT_IMPORT if name in sys.modules]:
        raise WorkerError(f"{', '.join(too_early)} was imported before the worker was pinned")
    threads = threads or thread_count(chosen)
    os.sched_setaffinity(0, chosen)
    if accelerator is not None:
        accelerator.hide_others()
        accelerator.let_segments_grow()
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    os.environ.setdefault(SPIN_VARIABLE, SPINS)
    os.environ.setdefault(SILENCE_VARIABLE, "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    return Pinned(chosen, threads, accelerator, sharing)


def usable_cpus(cpus: str | None) -> frozenset[int]:
    """The CPUs that `--cpus` names, or all that this process may use.

    A SettingsError if `cpus` is not a list of CPUs, or some of them are not available.
    """
    allowed = os.sched_getaffinity(0)
    chosen = allowed if cpus is None else parse_cpus(cpus)
    if missing := chosen - allowed:
        raise SettingsError(
            f"--cpus {cpus}: no CPU {format_cpus(missing)} here; this process may use {format_cpus(allowed)}"
        )
    return frozenset(chosen)


def thread_count(cpus: set[int] | frozenset[int]) -> int:
    """Compute threads for a set of CPUs: one per physical core, within the cgroup's quota."""
    return max(1, int(min(len(cores_of(cpus)), cpu_quota())))


def cores_of(cpus: set[int] | frozenset[int]) -> list[frozenset[int]]:
    """The physical cores of a set of CPUs, in order, each with its hyper-threads that are in the set."""
    cores: dict[tuple[str, str], set[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(_core_of(cpu), set()).add(cpu)
    return [frozenset(core) for core in cores.values()]


def parse_cpus(text: str, source: str = "--cpus") -> set[int]:
    """Parse `0-3,8` into a set of numbers; a SettingsError, which names `source`, if the text is not of that form."""
    cpus: set[int] = set()
    for part in text.split(","):
        found = _SPAN.fullmatch(part.strip())
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not span:
            raise SettingsError(f"{source} {text!r} is not a list of numbers such as 0-3 or 0,2")
        cpus.update(span)
    return cpus


def format_cpus(cpus: set[int] | frozenset[int]) -> str:
    """Format a set of CPUs as `0-3,8`."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _core_of(cpu: int) -> tuple[str, str]:
    """Package and core of a CPU, which hyper-threads share. A CPU with a hidden topology counts as a core."""
    topology = _CPU_FOLDER / f"cpu{cpu}" / "topology"
    try:
        package = (topology / "physical_package_id").read_text().strip()
        core = (topology / "core_id").read_text().strip()
    except OSError:
        return ("cpu", str(cpu))
    return (package, core)
