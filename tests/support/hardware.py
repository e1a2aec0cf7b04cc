"""Skips tests marked `amx`, `gpu`, `tensorrt` or `neuron` where the hardware is missing, and lists them at the end.

A test with a stand-in for a device has none of these marks: it does not show that the device works.
"""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from embedctl_config.cpu import cpu_flags

_PROPERTY = "needs"


@functools.cache
def missing(mark: str) -> str:
    """What this machine lacks for a test with this mark, in words; empty if the test can run.

    Only this function decides that. It imports the libraries that know, so call it only when such a test is about to
    run.
    """
    return _MISSING[mark]()


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


def _no_amx() -> str:
    return "" if cpu_flags() >= {"amx_tile", "amx_bf16"} else "a CPU with AMX"


_MISSING: Mapping[str, Callable[[], str]] = {
    "amx": _no_amx,
    "gpu": _no_gpu,
    "tensorrt": _no_tensorrt,
    "neuron": _no_neuron,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in _MISSING:
        if item.get_closest_marker(mark) is not None and (lacks := missing(mark)):
            item.user_properties.append((_PROPERTY, f"{lacks} (mark {mark})"))
            pytest.skip(f"needs {lacks}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    not_run: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        for name, needs in report.user_properties:
            if name == _PROPERTY:
                not_run[needs].append(report.nodeid)
    for needs, tests in sorted(not_run.items()):
        terminalreporter.section(f"not run: needs {needs}")
        for test in sorted(tests):
            terminalreporter.line(test)
