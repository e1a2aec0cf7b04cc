"""Copies between host and device, at the same time as the device computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.gpu.device import Event, Gpu

#: Each array begins at a multiple of this many elements, because kernels read whole cache lines.
ALIGNED = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch before it is copied to the device: integer arrays by name, and `facts`, private to the engine."""

    arrays: Mapping[str, np.ndarray[Any, Any]]
    facts: Any


@dataclass(frozen=True, slots=True)
class Output:
    """Vectors on their way to the host, float32, rows × dim, held by nothing else; and the event of their arrival."""

    vectors: torch.Tensor
    arrived: Event

    def wait(self) -> Vectors:
        """Wait for these vectors only, and copy them out of pinned memory."""
        self.arrived.synchronize()
        return np.array(self.vectors.numpy(), np.float32)


class Transfer:
    """Copies to the device, computing there, and copies back, each on a separate stream."""

    def __init__(self, device: Gpu) -> None:
        self._device = device
        self._inward, self._outward = device.stream(), device.stream()
        self._compute = device.stream()

    def computing(self) -> Any:
        """A context: work that is begun inside it runs on the computing stream."""
        return self._device.on(self._compute)

    def upload(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
        """Copy integer arrays to the device in one transfer, as int32, for use on the computing stream."""
        begins, size = {}, 0
        for name, array in arrays.items():
            begins[name] = size
            size += -(-array.size // ALIGNED) * ALIGNED
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
        """Begin to copy vectors to the host, once the computing stream has made them."""
        made, arrived = self._device.event(), self._device.event()
        made.record(self._compute)
        self._outward.wait_event(made)
        with self._device.on(self._outward):
            there = self._device.pinned(tuple(vectors.shape), torch.float32)
            there.copy_(vectors, non_blocking=True)
            arrived.record(self._outward)
        self._device.keep_for(self._outward, vectors)
        return Output(there, arrived)
