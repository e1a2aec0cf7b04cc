"""How much CPU time the control groups grant to this process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def cpu_quota() -> float:
    """The CPU quota of cgroup v2 or v1, in CPUs, rounded up; infinite without a quota.

    The smallest quota counts, among those of this process's group and the groups above it.
    """
    return min(map(_granted, _groups()), default=math.inf)


def _groups() -> Iterator[Path]:
    """The folders of this process's groups and of the groups above them, under the mount points."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [_MOUNT]
        elif "cpu" in controllers.split(","):
            mounts = [_MOUNT / controllers, _MOUNT / "cpu"]
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
