"""The machine of a measurement, and the load that other processes put on it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

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


@contextmanager
def measured_load() -> Iterator[dict[str, float]]:
    """Measure the load of a block: when it has ended, its `seconds`, and the numbers of CPUs that other processes than
    this one and its descendants used (`others_cpus`), and that the hypervisor took (`stolen_cpus`), on average."""
    found: dict[str, float] = {}
    began, busy, stolen, ours = time.monotonic(), *_all_cpus(), cpu_seconds()
    yield found
    wall = time.monotonic() - began
    busy, stolen = (now - then for now, then in zip(_all_cpus(), (busy, stolen), strict=True))
    others = max(0.0, busy - (cpu_seconds() - ours))
    found |= {"seconds": wall, "others_cpus": others / wall, "stolen_cpus": stolen / wall}


def _all_cpus() -> tuple[float, float]:
    """CPU time of all CPUs together, in processes and in the kernel, and what the hypervisor took from CPUs that had
    work (seconds)."""
    import psutil  # the extra `bench` is looked for before anything is measured

    used = psutil.cpu_times()
    # Guest times are in user and nice already.
    busy = sum(getattr(used, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    return busy, getattr(used, "steal", 0.0)


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
