"""What a control group bounds: CPUs and memory; and a bound for the memory of this process."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
#: Version 1 has no word for "no limit", but a number above all memories (bytes).
_UNLIMITED = 2**62
_STATUS, _MACHINE = Path("/proc/self/status"), Path("/proc/meminfo")
#: However little is left, a text may take so much (bytes).
_LEAST = 1024**3


def cpu_quota() -> float:
    """The CPU quota of cgroup v2 or v1, in CPUs, rounded up; infinite without a quota.

    The smallest quota counts, among those of this process's group and the groups above it.
    """
    return min(map(_granted, _groups("cpu")), default=math.inf)


def memory_left() -> float:
    """The bytes that this process may still take before a group's limit kills in it; infinite without a limit.

    What files keep in memory, and the kernel would drop first, counts as left.
    """
    return min(map(_left, _groups("memory")), default=math.inf)


def killed_for_memory() -> int:
    """How many processes of this process's group the kernel has killed so far because memory ran out."""
    for group in reversed(list(_groups("memory"))):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, LookupError, ValueError):
                return _facts(group / name)["oom_kill"]
    return 0


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups and of the groups above them, under the mount points, the lowest last."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [_MOUNT]
        elif controller in controllers.split(","):
            mounts = [_MOUNT / controllers, _MOUNT / controller]
        else:
            continue
        names = [name for name in path.split("/") if name]
        # In a container, the path may be the host's, or lead out of the mount. The container's group is then the mount.
        names = [] if ".." in names else names
        for mount in mounts:
            yield from (mount.joinpath(*names[:depth]) for depth in range(len(names) + 1))


def _granted(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = ((group / f"cpu.cfs_{each}_us").read_text(encoding="ascii") for each in ("quota", "period"))
        granted = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no group, or `max`
        return math.inf
    return math.ceil(granted) if granted > 0 else math.inf


def _left(group: Path) -> float:
    limit, used, dropped = (
        ("max", "current", "inactive_file")
        if (group / "memory.max").exists()
        else ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    )
    try:
        most, taken = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in (limit, used))
        left = most - taken + _facts(group / "memory.stat")[dropped]
    except (OSError, LookupError, ValueError):  # no group, or `max`
        return math.inf
    return max(0, left) if most < _UNLIMITED else math.inf


def _facts(file: Path) -> dict[str, int]:
    """A file of the kernel that has a name and a number in each line."""
    return {name: int(number) for name, number in map(str.split, file.read_text(encoding="ascii").splitlines())}


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
