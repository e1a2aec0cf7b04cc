"""The machine of a measurement, and the load that other processes put on it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from embedctl_config.cpu import cpu_flags, cpu_name
from embedctl_workers.machine import provenance
from embedctl_workers.machine.cgroup import cpu_quota
from embedctl_workers.machine.devices import cores_of, format_cpus

#: Instruction sets that engines look for.
_INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "sve", "i8mm", "bf16",
)  # fmt: skip
#: Packages of the queue, whose versions matter too.
_QUEUE = ("celery", "kombu", "redis")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time of the machine since it started, or between two moments (seconds).

    Attributes:
        wall: elapsed time.
        busy: CPU time of all CPUs together, in processes and in the kernel.
        ours: the part of it in this process and its descendants.
        steal: time that the hypervisor took from CPUs that had work.
    """

    wall: float
    busy: float
    ours: float
    steal: float

    @classmethod
    def read(cls) -> Usage:
        import psutil  # the extra `bench` is looked for before anything is measured

        used = psutil.cpu_times()
        # Guest times are in user and nice already.
        busy = sum(getattr(used, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
        return cls(time.monotonic(), busy, cpu_seconds(), getattr(used, "steal", 0.0))

    def since(self, before: Usage) -> Usage:
        """The difference to an earlier moment."""
        return Usage(*(getattr(self, name) - getattr(before, name) for name in ("wall", "busy", "ours", "steal")))

    @property
    def others(self) -> float:
        """The number of CPUs that other processes used, on average."""
        return max(0.0, self.busy - self.ours) / self.wall if self.wall > 0 else 0.0

    def as_json(self) -> dict[str, float]:
        """The number of CPUs that other processes used, and that the hypervisor took, on average."""
        stolen = self.steal / self.wall if self.wall > 0 else 0.0
        return {"others_cpus": round(self.others, 3), "stolen_cpus": round(stolen, 3)}


def cpu_seconds(pid: int | None = None) -> float:
    """CPU time of a process, by default this one, of its descendants, and of their children that have ended."""
    import psutil  # as above

    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has ended
                total += sum(each.cpu_times()[:4])  # user, system, and those of children that have ended
    return total


def facts(cpus: Collection[int]) -> dict[str, object]:
    """Facts of the machine and of the CPUs used, by name, as a report shows them."""
    flags = cpu_flags()
    quota = cpu_quota()
    return {
        "CPU": cpu_name(),
        "instructions": " ".join(each for each in _INSTRUCTIONS if each in flags) or "none that engines look for",
        "CPUs used": f"{format_cpus(frozenset(cpus))} of {os.cpu_count()}: {len(cores_of(frozenset(cpus)))} cores"
        + ("" if quota > len(cpus) else f", of which a control group grants {quota:g}"),
        "virtual machine": "hypervisor" in flags,
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that determine speed."""
    return provenance.versions((*provenance.PACKAGES, *_QUEUE))
