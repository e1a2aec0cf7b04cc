"""Stands in for NVIDIA's `pynvml`: the file `gpus.json` beside this one says which GPUs there are, and what fails.

It has the names and the arguments of the real module, and raises where the driver would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE = 0, 1
_PLACES = 7
_machine: dict[str, Any] = {}


class NVMLError(Exception):
    """As of the real module, without the numbers."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801  (the real one's name)
    """The device can't tell that."""


class NVMLError_NotFound(NVMLError):  # noqa: N801
    """There is no part in this place."""


class _Facts:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


def nvmlInit() -> None:  # noqa: N802
    machine = json.loads(Path(__file__).with_name("gpus.json").read_text())
    if "init" in machine["fails"]:
        raise NVMLError(machine["fails"]["init"])
    _machine.update(machine)


def nvmlShutdown() -> None:  # noqa: N802
    _machine.clear()


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return str(_machine["driver"])


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_machine["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> Any:  # noqa: N802
    if "handle" in _machine["fails"]:
        raise NVMLError(_machine["fails"]["handle"])
    return _machine["gpus"][index]


def nvmlDeviceGetUUID(handle: Any) -> str:  # noqa: N802
    return str(handle["uuid"])


def nvmlDeviceGetName(handle: Any) -> str:  # noqa: N802
    return str(handle["name"])


def nvmlDeviceGetMemoryInfo(handle: Any, version: int | None = None) -> Any:  # noqa: N802
    if not handle["memory"]:
        raise NVMLError_NotSupported
    return _Facts(total=handle["memory"] * 2**20)


def nvmlDeviceGetPciInfo(handle: Any) -> Any:  # noqa: N802
    return _Facts(busId=handle["bus"])


def nvmlDeviceGetMigMode(device: Any) -> list[int]:  # noqa: N802
    if device["parts"] is None:
        raise NVMLError_NotSupported
    return [NVML_DEVICE_MIG_ENABLE if device["parts"] else NVML_DEVICE_MIG_DISABLE] * 2


def nvmlDeviceGetMaxMigDeviceCount(device: Any) -> int:  # noqa: N802
    return _PLACES


def nvmlDeviceGetMigDeviceHandleByIndex(device: Any, index: int) -> Any:  # noqa: N802
    """The parts have every other place."""
    if index % 2 or index // 2 >= len(device["parts"]):
        raise NVMLError_NotFound
    return device["parts"][index // 2]
