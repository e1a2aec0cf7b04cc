"""Skips a test marked `needs(…)` where the machine lacks something of that, and lists at the end what was not tested.

A test with a stand-in for a device does not need the device: it does not show that the device works.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from embedctl_config.cpu import LEVELS, bf16_unit, cpu_flags
from embedctl_workers.machine.devices import thread_count

_PROPERTY = "needs"


@functools.cache
def missing(what: str) -> str:
    """What this machine lacks for a test that needs this, in words; empty if the test can run.

    Only this function decides that, and for CPUs it asks what the product asks. It imports the libraries that know
    GPUs, so call it only when such a test is about to run.
    """
    return _MISSING[what]()


def _no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "PyTorch and a GPU"
    return "" if torch.cuda.is_available() else "a GPU that PyTorch sees"


def _no_tensorrt() -> str:
    try:
        importlib.import_module("tensorrt")
    except ImportError:
        return "TensorRT and a GPU"
    return missing("gpu") and "a GPU for TensorRT"


def _no_neuron() -> str:
    try:
        torch_neuronx = importlib.import_module("torch_neuronx")
    except Exception:  # noqa: BLE001  (the placeholder package of that name may raise anything)
        return "torch_neuronx and a Neuron device"
    if not hasattr(torch_neuronx, "trace"):
        return "a torch_neuronx with trace"
    return "" if any(Path("/dev").glob("neuron[0-9]*")) else "a Neuron device"


def _no_cores() -> str:
    return "" if thread_count(os.sched_getaffinity(0)) > 1 else "two CPU cores"


def _no_compiler() -> str:
    return "" if shutil.which("gcc") or shutil.which("cc") else "a C compiler"


def _no_cpu(name: str, *any_of: frozenset[str]) -> Callable[[], str]:
    return lambda: "" if any(each <= cpu_flags() for each in any_of) else f"a CPU with {name}"


_MISSING: Mapping[str, Callable[[], str]] = {
    "gpu": _no_gpu,
    "tensorrt": _no_tensorrt,
    "neuron": _no_neuron,
    "cores": _no_cores,
    "compiler": _no_compiler,
    "x86": _no_cpu("the instructions of x86-64", LEVELS["x86-64"]),
    "avx2": _no_cpu("AVX2", LEVELS["x86-64-v3"]),
    "avx512": _no_cpu("AVX-512", LEVELS["x86-64-v4"]),
    "avx512_bf16": _no_cpu("AVX512_BF16", frozenset({"avx512_bf16"})),
    "amx": _no_cpu("AMX", frozenset({"amx_tile", "amx_bf16", "avx512_bf16"})),
    "bf16": lambda: "" if bf16_unit() else "a CPU with bf16",
    "vnni": _no_cpu("VNNI", frozenset({"avx512_vnni"}), frozenset({"avx_vnni"})),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for what in mark.args:
            if lacks := missing(what):
                item.user_properties.append((_PROPERTY, lacks))
                pytest.skip(f"{item.name} was not run: it needs {lacks}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    not_run: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        for name, needs in report.user_properties:
            if name == _PROPERTY:
                not_run[needs].append(report.nodeid)
    for needs, tests in sorted(not_run.items()):
        terminalreporter.section(f"not tested: needs {needs}")
        for test in sorted(tests):
            terminalreporter.line(test)
