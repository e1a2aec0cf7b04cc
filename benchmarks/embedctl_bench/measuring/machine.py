"""The machine of a measurement, and the load that other processes put on it meanwhile."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

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
_PROC = Path("/proc")


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
        """The usage now; zeros if there is no /proc."""
        try:
            wall = float((_PROC / "uptime").read_text(encoding="ascii").split()[0])
            first = (_PROC / "stat").read_text(encoding="ascii").split("\n", 1)[0]
        except OSError:
            return cls(0.0, 0.0, 0.0, 0.0)
        # proc(5): user, nice, system, idle, iowait, irq, softirq, steal; guest times are in user and nice already.
        ticks = [int(each) for each in first.split()[1:9]]
        hertz = os.sysconf("SC_CLK_TCK")
        busy = sum(ticks[:3]) + sum(ticks[5:7])
        return cls(wall, busy / hertz, _ticks_of(os.getpid()) / hertz, (ticks[7] if len(ticks) > 7 else 0) / hertz)

    def since(self, before: Usage) -> Usage:
        """The difference to an earlier moment."""
        return Usage(
            self.wall - before.wall, self.busy - before.busy, self.ours - before.ours, self.steal - before.steal
        )

    @property
    def others(self) -> float:
        """The number of CPUs that other processes used, on average."""
        return max(0.0, self.busy - self.ours) / self.wall if self.wall > 0 else 0.0

    @property
    def stolen(self) -> float:
        """The number of CPUs that the hypervisor took, on average."""
        return self.steal / self.wall if self.wall > 0 else 0.0

    def as_json(self) -> dict[str, float]:
        """The part that is kept with a measurement."""
        return {"others_cpus": round(self.others, 3), "stolen_cpus": round(self.stolen, 3)}


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
    return provenance.versions(*_QUEUE)


def _ticks_of(pid: int) -> int:
    """CPU time of a process, of its descendants, and of their children that have ended (clock ticks)."""
    times: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            continue
        # proc(5): after the command, which may hold blanks and brackets: state, ppid, ... utime, stime, cutime, cstime.
        fields = stat.rpartition(")")[2].split()
        times[int(folder.name)] = sum(int(each) for each in fields[11:15])
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    total, waiting = 0, [pid]
    while waiting:
        each = waiting.pop()
        total += times.get(each, 0)
        waiting += children.get(each, [])
    return total
