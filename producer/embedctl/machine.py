"""Which machine this is and which of its processes run: what only somebody on the same machine can tell."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def machine_id() -> str:
    """The same for two processes exactly if each sees the other's pid: one boot of one kernel, one pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def process_id(pid: int) -> str:
    """A pid, and what tells the process from a later one of the same pid; empty if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() else _without_proc(pid)
    # proc(5): after the command, which may hold blanks and brackets, come the state and 18 more fields, then the start.
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{pid}.{rest[18]}"


def runs(process: str) -> bool:
    """Whether the process that had this :func:`process_id` still runs, be it stopped; true where there is none."""
    return not process or process_id(int(process.partition(".")[0])) == process


def _without_proc(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return str(pid)
