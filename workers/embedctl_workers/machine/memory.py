"""A bound for the memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path

from embedctl_workers.machine.cgroup import memory_left

_STATUS, _MACHINE = Path("/proc/self/status"), Path("/proc/meminfo")
#: However little is left, a text may take so much (bytes).
_LEAST = 1024**3


def bound_memory() -> int | None:
    """Let this process take at most half of the memory that is left here, beyond what it has; at least 1 GiB, but never
    more than its control group has left.

    What it asks for beyond that is refused: it is an error like any other, or the end of this process. Returns the
    bound (bytes); None where the system has none.

    The bound is on what the process has to itself (RLIMIT_DATA). With torch and onnxruntime on CPUs, that is within 10%
    of what is resident. Addresses (RLIMIT_AS) are no measure, because CUDA reserves many times the machine's memory.
    """
    try:
        own, of_machine = _bytes_in(_STATUS, "VmData"), _bytes_in(_MACHINE, "MemAvailable")
    except (OSError, LookupError, ValueError):  # not Linux
        return None
    of_group = memory_left()
    bound = own + int(min(of_group, max(_LEAST, min(of_machine, of_group) // 2)))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    return bound


def _bytes_in(file: Path, name: str) -> int:
    """A fact of a file of the kernel, which has it in KiB; raises LookupError if it is not there."""
    lines = dict(line.split(":", 1) for line in file.read_text("ascii", errors="replace").splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024
