"""Identifies this machine and its running processes, which only a process of the same machine can check."""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """An id that two processes share exactly if each sees the other's pid: one boot of one kernel, one pid namespace.
    Empty if there is no such id, as on systems other than Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def process_id(pid: int) -> str:
    """A pid and the start time of its process, which tells it from a later process with this pid; empty if none runs.
    The pid alone if /proc does not show the process: on systems other than Linux, or with hidepid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return str(pid) if _exists(pid) else ""
    # proc(5): the command may contain spaces and brackets. After it come the state, 18 more fields and the start time.
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{pid}.{rest[18]}"


def runs(process: str) -> bool:
    """Whether the process with this :func:`process_id` still exists, running or stopped; true for an empty id."""
    pid = process.partition(".")[0]
    return not process or process_id(int(pid)) in (process, pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
