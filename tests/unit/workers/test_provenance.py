"""What a report says of the machine."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from embedctl_config.cpu import cpu_name
from embedctl_workers.machine import provenance
from embedctl_workers.machine.devices import Accelerator, Pinned
from tests.support.machines import play_gpus

GPU = Accelerator("gpu", 1, "GPU-1234", "NVIDIA H200")
CORE = Accelerator("neuron", 3, "3", "inf2.xlarge")


def pinned(accelerator: Accelerator | None = None) -> Pinned:
    return Pinned(frozenset({0, 1, 5}), 2, accelerator)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel shows of drivers; NVIDIA's own can't be asked."""
    monkeypatch.setattr(provenance, "_MODULES", tmp_path / "module")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return tmp_path / "module"


def driver_in(modules: Path, name: str, version: str) -> None:
    (modules / name).mkdir(parents=True)
    (modules / name / "version").write_text(f"{version}\n")


def test_of_a_cpu_there_is_the_model_and_no_driver() -> None:
    found = provenance.describe(pinned())
    assert set(found) == {"device", "cpus", "system", "load"}
    assert found["device"] == f"CPU {cpu_name()}"
    assert found["cpus"] == "0-1,5, 2 compute threads"
    assert found["system"] == platform.platform()


def test_a_gpus_driver_is_asked_for_its_version(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(tmp_path / "driver", driver="580.159.04")
    monkeypatch.syspath_prepend(str(tmp_path / "driver"))
    monkeypatch.delitem(sys.modules, "pynvml")
    found = provenance.describe(pinned(GPU))
    assert found["device"] == "gpu 1 NVIDIA H200 (GPU-1234)"
    assert found["driver"] == "nvidia 580.159.04"
    assert found["host"] == cpu_name()


@pytest.mark.parametrize("is_there", [False, True])
def test_else_the_kernel_is(is_there: bool, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_there:
        play_gpus(tmp_path / "driver", init="Unknown Error")
        monkeypatch.syspath_prepend(str(tmp_path / "driver"))
        monkeypatch.delitem(sys.modules, "pynvml")
    assert provenance.describe(pinned(GPU))["driver"] == "unknown"
    driver_in(modules, "nvidia", "580.159.04")
    assert provenance.describe(pinned(GPU))["driver"] == "nvidia 580.159.04"
    driver_in(modules, "amdgpu", "6.14")
    assert provenance.describe(pinned(replace(GPU, rocm=True)))["driver"] == "amdgpu 6.14"
    assert provenance.describe(pinned(CORE))["driver"] == "unknown"
    driver_in(modules, "neuron", "2.21")
    assert provenance.describe(pinned(CORE))["driver"] == "neuron 2.21"
