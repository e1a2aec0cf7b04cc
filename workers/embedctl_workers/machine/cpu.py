"""What kind of CPU this machine has, as Linux tells it."""

from __future__ import annotations

import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
#: Lines that tell kinds of CPU apart: x86's, then ARM's.
_TELLING = ("model name", "flags", "CPU implementer", "CPU part", "Features")


def cpu_name() -> str:
    """The CPU's model; its architecture where Linux does not name it."""
    names = (line.partition(":")[2].strip() for line in _lines() if line.startswith("model name"))
    return next(names, platform.machine())


def cpu_flags() -> frozenset[str]:
    """Its instruction sets, by the kernel's names; empty where it does not say."""
    flags = next((line for line in _lines() if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def cpu_identity() -> str:
    """What tells this CPU's kind and instruction set from another's: machines may share a cache."""
    telling = {line for line in _lines() if line.startswith(_TELLING)}
    return "\n".join([platform.machine(), *sorted(telling)])


def _lines() -> list[str]:
    try:
        return _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
