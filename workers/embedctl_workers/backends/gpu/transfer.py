"""Between host and device, beside what the device computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.gpu.device import Event, GpuDevice

#: What each array begins at a multiple of: kernels read whole lines of a cache.
_ALIGNED = 32


@dataclass(frozen=True, slots=True)
class Output:
    """Vectors on their way to the host, float32, rows × dim, which nobody else holds; and when they have arrived."""

    vectors: torch.Tensor
    arrived: Event

    def wait(self) -> Vectors:
        """Wait for them alone, and take them out of pinned memory."""
        self.arrived.synchronize()
        return np.array(self.vectors.numpy(), np.float32)


class Transfer:
    """Copies to the device, computing there, and copies back: each on a stream of its own."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device
        self._inward, self._outward = device.stream(), device.stream()
        self._compute = device.stream()

    def computing(self) -> Any:
        """What is begun within runs on the stream that uploads are for."""
        return self._device.on(self._compute)

    def upload(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
        """Arrays of integers on the device, int32, by one copy; to be used on the stream that computes."""
        begins, size = {}, 0
        for name, array in arrays.items():
            begins[name] = size
            size += -(-array.size // _ALIGNED) * _ALIGNED
        staged = self._device.pinned((size,), torch.int32)
        flat = staged.numpy()
        for name, array in arrays.items():
            flat[begins[name] : begins[name] + array.size] = array.ravel()
        copied = self._device.event()
        with self._device.on(self._inward):
            there = staged.to(self._device.device, non_blocking=True)
            copied.record(self._inward)
        self._compute.wait_event(copied)
        self._device.keep_for(self._compute, there)
        return {
            name: there[begins[name] : begins[name] + array.size].view(array.shape) for name, array in arrays.items()
        }

    def download(self, vectors: torch.Tensor) -> Output:
        """Have what the stream that computes makes copied to the host."""
        made, arrived = self._device.event(), self._device.event()
        made.record(self._compute)
        self._outward.wait_event(made)
        with self._device.on(self._outward):
            there = self._device.pinned(tuple(vectors.shape), torch.float32)
            there.copy_(vectors, non_blocking=True)
            arrived.record(self._outward)
        self._device.keep_for(self._outward, vectors)
        return Output(there, arrived)
