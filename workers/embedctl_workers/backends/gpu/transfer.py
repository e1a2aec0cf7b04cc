"""Copies between host and device, at the same time as the device computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embedctl_config.outputs import Output
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.gpu.device import Event, Gpu

#: Each array begins at a multiple of this many elements, because kernels read whole cache lines.
ALIGNED = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch before it is copied to the device: integer arrays by name, and `facts`, private to the engine."""

    arrays: Mapping[str, np.ndarray[Any, Any]]
    facts: Any


@dataclass(frozen=True, slots=True)
class Arriving:
    """Numbers of texts on their way to the host, float32, held by nothing else; and the event of their arrival."""

    found: Mapping[Output, torch.Tensor]
    arrived: Event
    tokens: Tokens  #: which the texts are among, in these rows
    rows: Rows

    def wait(self) -> dict[Output, Vectors]:
        """Wait for these numbers only, and copy them out of pinned memory."""
        self.arrived.synchronize()
        return {output: np.array(each.numpy(), np.float32) for output, each in self.found.items()}


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

    def download(self, found: Mapping[Output, torch.Tensor], tokens: Tokens, rows: Rows) -> Arriving:
        """Begin to copy numbers to the host, once the computing stream has made them."""
        made, arrived = self._device.event(), self._device.event()
        made.record(self._compute)
        self._outward.wait_event(made)
        with self._device.on(self._outward):
            there = {output: self._device.pinned(tuple(each.shape), torch.float32) for output, each in found.items()}
            for output, each in found.items():
                there[output].copy_(each, non_blocking=True)
            arrived.record(self._outward)
        for each in found.values():
            self._device.keep_for(self._outward, each)
        return Arriving(there, arrived, tokens, rows)
