"""The kind of CPU of this machine, as Linux reports it."""

from __future__ import annotations

import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
#: Lines that distinguish kinds of CPU: those of x86, then those of ARM.
_IDENTIFYING = ("model name", "flags", "CPU implementer", "CPU part", "Features")


def cpu_name() -> str:
    """The CPU's model, or its architecture if Linux does not name the model."""
    names = (line.partition(":")[2].strip() for line in _lines() if line.startswith("model name"))
    return next(names, platform.machine())


def cpu_flags() -> frozenset[str]:
    """The CPU's instruction sets, by the kernel's names; empty if the kernel lists none."""
    flags = next((line for line in _lines() if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def bf16_unit() -> str:
    """What this CPU has for matrix products in bf16: `AMX`, `AVX512_BF16`, or nothing."""
    flags = cpu_flags()
    return "AMX" if "amx_bf16" in flags else "AVX512_BF16" if "avx512_bf16" in flags else ""


def no_bf16() -> str:
    """Why this CPU has nothing for matrix products in bf16; empty if it has."""
    if bf16_unit():
        return ""
    return "this CPU has nothing for bf16, neither AMX nor AVX512_BF16: use class cpu, as fast here and more accurate"


def cpu_identity() -> str:
    """Text that distinguishes this CPU's kind and instruction sets from others', because machines may share a cache."""
    telling = {line for line in _lines() if line.startswith(_IDENTIFYING)}
    return "\n".join([platform.machine(), *sorted(telling)])


def _lines() -> list[str]:
    try:
        return _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
