"""Which machine this is and which of its processes run: what only somebody on the same machine can tell."""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """The same for two processes exactly if each sees the other's pid: one boot of one kernel, one pid namespace. Empty
    where that can't be told: not on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def process_id(pid: int) -> str:
    """A pid, and what tells the process from a later one of the same pid; empty if it does not run.

    The pid alone where /proc does not show the process: not on Linux, or hidden from other users (hidepid).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return str(pid) if _exists(pid) else ""
    # proc(5): after the command, which may hold blanks and brackets, come the state and 18 more fields, then the start.
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{pid}.{rest[18]}"


def runs(process: str) -> bool:
    """Whether the process that had this :func:`process_id` still runs, be it stopped; true where there is none."""
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
