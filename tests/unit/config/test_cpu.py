"""What Linux tells of a CPU, here and in words of other machines."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from embedctl_config import cpu
from embedctl_config.errors import SettingsError

X86 = "model name\t: A CPU @ 3 GHz\ncpu MHz\t: {mhz}\nflags\t\t: sse avx2\nmodel name\t: another\nflags\t\t: sse\n"
ARM = "BogoMIPS\t: 50.00\nFeatures\t: asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(cpu.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "_CPU_INFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("content", "name", "flags"),
    [(X86, "A CPU @ 3 GHz", frozenset({"sse", "avx2"})), (ARM, platform.machine(), frozenset({"asimd", "asimddp"}))],
)
def test_name_and_flags_are_the_first_ones(content: str, name: str, flags: frozenset[str], info: Path) -> None:
    info.write_text(content, encoding="utf-8")
    assert (cpu.cpu_name(), cpu.cpu_flags()) == (name, flags)


def test_a_machine_that_tells_nothing_has_its_architecture(info: Path) -> None:
    for _ in ("no file", "an empty one"):
        assert (cpu.cpu_name(), cpu.cpu_flags()) == (platform.machine(), frozenset())
        assert cpu.cpu_identity() == platform.machine()
        info.touch()


def test_another_instruction_set_is_another_cpu_and_another_clock_is_not(info: Path) -> None:
    found = set()
    for content in (X86.format(mhz=2000), X86.format(mhz=3000), X86.replace("avx2", "avx512f"), ARM):
        info.write_text(content, encoding="utf-8")
        found.add(cpu.cpu_identity())
    assert len(found) == 3


@pytest.mark.parametrize(
    ("flags", "unit"),
    [("amx_tile amx_bf16 avx512_bf16", "AMX"), ("avx512f avx512_bf16", "AVX512_BF16"), ("avx512f avx512_vnni", "")],
)
def test_what_a_cpu_has_for_bf16(flags: str, unit: str, info: Path) -> None:
    info.write_text(f"flags : {flags}\n", encoding="utf-8")
    assert cpu.bf16_unit() == unit
    assert bool(cpu.no_bf16()) is not bool(unit)


@pytest.mark.needs("x86")
def test_a_level_hides_what_is_newer_from_our_code_and_from_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.LEVEL_VARIABLE, raising=False)
    own, identity = cpu.cpu_flags(), cpu.cpu_identity()
    monkeypatch.setenv(cpu.LEVEL_VARIABLE, "x86-64")
    assert cpu.cpu_flags() == cpu.LEVELS["x86-64"] < own
    assert cpu.compiler_target() == "x86-64"
    assert cpu.cpu_identity() != identity
    assert cpu.no_bf16()


def test_a_level_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, info: Path) -> None:
    info.write_text(f"flags : {' '.join(cpu.LEVELS['x86-64-v2'])} avx\n", encoding="utf-8")
    monkeypatch.setenv(cpu.LEVEL_VARIABLE, "avx2")
    with pytest.raises(SettingsError, match="'avx2' is none of x86-64, x86-64-v2, x86-64-v3, x86-64-v4"):
        cpu.compiler_target()
    monkeypatch.setenv(cpu.LEVEL_VARIABLE, "x86-64-v3")
    for ask in (cpu.cpu_flags, cpu.cpu_identity, cpu.compiler_target):
        with pytest.raises(SettingsError, match="this CPU is no x86-64-v3: it lacks abm, avx2, bmi1"):
            ask()
    monkeypatch.setenv(cpu.LEVEL_VARIABLE, "x86-64-v2")
    assert cpu.cpu_flags() == cpu.LEVELS["x86-64-v2"]
