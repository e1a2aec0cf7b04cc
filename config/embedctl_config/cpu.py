"""The kind of CPU of this machine, as Linux reports it: the one place that decides what our code may use of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from embedctl_config.errors import SettingsError

#: No setting: tests set it to a level below, and our code then uses nothing newer on any CPU. What reads it raises
#: SettingsError if it names no level, or one that this CPU does not have.
LEVEL_VARIABLE = "EMBEDCTL_CPU_LEVEL"
_V1 = frozenset(["cmov", "cx8", "fpu", "fxsr", "mmx", "sse", "sse2", "syscall"])
_V2 = _V1 | frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
#: The levels of x86-64 that its ABI defines, by the compilers' names, and their instruction sets by the kernel's names.
LEVELS: Mapping[str, frozenset[str]] = {"x86-64": _V1, "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}

_CPU_INFO = Path("/proc/cpuinfo")
#: Lines that distinguish kinds of CPU: those of x86, then those of ARM.
_IDENTIFYING = ("model name", "flags", "CPU implementer", "CPU part", "Features")


def cpu_name() -> str:
    """The CPU's model, or its architecture if Linux does not name the model."""
    names = (line.partition(":")[2].strip() for line in _lines() if line.startswith("model name"))
    return next(names, platform.machine())


def cpu_flags() -> frozenset[str]:
    """The instruction sets that our code may use, by the kernel's names; empty if the kernel lists none."""
    flags, level = _own_flags(), _level()
    return flags & LEVELS[level] if level else flags


def compiler_target() -> str:
    """What a compiler is told with `-march=`, so that it uses what :func:`cpu_flags` has."""
    return _level() or "native"


def _own_flags() -> frozenset[str]:
    flags = next((line for line in _lines() if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def _level() -> str:
    """The level that the environment names; empty if it names none."""
    level = os.environ.get(LEVEL_VARIABLE, "")
    if not level:
        return ""
    if level not in LEVELS:
        raise SettingsError(f"{LEVEL_VARIABLE}: {level!r} is none of {', '.join(LEVELS)}")
    if lacking := LEVELS[level] - _own_flags():
        raise SettingsError(f"{LEVEL_VARIABLE}: this CPU is no {level}: it lacks {', '.join(sorted(lacking))}")
    return level


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
    level = _level()
    return "\n".join([platform.machine(), *sorted(telling), *([f"no more than {level}"] if level else [])])


def _lines() -> list[str]:
    try:
        return _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
