"""NVIDIA's GPUs and their parts, as the driver tells them; asking makes no context, so pinning still works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl_config.errors import WorkerError

_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the driver's, with the number that `nvidia-smi` shows."""

    index: int
    uuid: str
    name: str
    memory: int  #: in MiB; 0 if it has none of its own
    bus: str  #: its PCI address, such as `00000000:3B:00.0`
    parts: tuple[tuple[str, str], ...]  #: the UUID and the name of each part (MIG) that it is divided into


def all_gpus() -> list[Gpu]:
    """All GPUs of the driver's; none if the kernel has no such device.

    A WorkerError if the kernel has some, and the driver or its package in Python is missing, or if the driver fails.
    """
    with _driver() as nvml:
        return [] if nvml is None else [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def driver_version() -> str:
    """The driver's version; empty if it is missing or fails."""
    with suppress(WorkerError), _driver() as nvml:
        return "" if nvml is None else str(nvml.nvmlSystemGetDriverVersion())
    return ""


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = 0
    with suppress(nvml.NVMLError_NotSupported):  # it shares the host's memory
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory=memory,
        bus=nvml.nvmlDeviceGetPciInfo(handle).busId,
        parts=tuple(_parts(nvml, handle)),
    )


def _parts(nvml: Any, handle: Any) -> Iterator[tuple[str, str]]:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:
        return
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError_NotFound):  # there are as many places as parts of the smallest size
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            yield nvml.nvmlDeviceGetUUID(part), nvml.nvmlDeviceGetName(part)


@contextmanager
def _driver() -> Iterator[Any | None]:
    """The driver's library while the block runs; None if it can't be had, and the kernel has no GPU of NVIDIA's."""
    nvml, missing = _opened()
    if nvml is None and any(_DEVICES.glob("nvidia[0-9]*")):
        raise WorkerError(f"NVIDIA's GPUs are not found: {missing}")
    if nvml is None:
        yield None
        return
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise WorkerError(f"NVIDIA's driver says: {error}") from error
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _opened() -> tuple[Any | None, str]:
    """The driver's library, or None and why."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed: pip install 'embedctl[gpu]'"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVIDIA's driver says: {error}"
    return pynvml, ""
