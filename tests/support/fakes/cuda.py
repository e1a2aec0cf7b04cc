"""Stands in for a GPU as `embedctl_workers.backends.tensorrt.runtime` has it: its work is queued, and done on the CPU.

Nothing is done before somebody waits for it, so that memory which is let go too early, results that are read too early
and work outside of the stream are seen.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from embedctl_workers.backends.gpu.device import watched
from embedctl_workers.backends.tensorrt.runtime import CudaDevice

_HANDLES = iter(range(0x7000, 0x8000))


class FakeEvent:
    """Comes when the work before it is done."""

    def __init__(self, device: FakeDevice, after: int) -> None:
        self._device, self._after = device, after

    def synchronize(self) -> None:
        self._device.run(self._after)


class FakeDevice(CudaDevice):
    """The same on the CPU.

    Attributes:
        broken: set, nothing more can be done with it in this process.
        free: bytes that may still be taken; None for any number.
    """

    def __init__(self, name: str = "Fake GPU", capability: str = "0.0") -> None:
        self.name, self.capability = name, capability
        self.stream = next(_HANDLES)
        self.device = torch.device("cpu")
        self.broken = False
        self.free: int | None = None
        self._memory: dict[int, weakref.ref[torch.Tensor]] = {}
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()
        self._asked = 0
        self._lock = threading.RLock()
        self._thread = threading.local()

    @contextmanager
    def current(self) -> Iterator[None]:
        before, self._thread.inside = self.is_current, True
        yield
        self._thread.inside = before

    @property
    def is_current(self) -> bool:
        return getattr(self._thread, "inside", False)

    def watched(self) -> AbstractContextManager[object]:
        gpu: Any = self
        return watched(gpu)

    def put(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        tensor = self._take(torch.full(array.shape, -1, dtype=torch.int64))
        target = weakref.ref(tensor)
        source = torch.from_numpy(array.copy())

        def copy() -> None:
            if (alive := target()) is not None:
                alive.copy_(source)

        self.ask(copy)
        return tensor

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        return self._take(torch.full(tuple(shape), torch.nan))

    def scratch(self, size: int) -> torch.Tensor:
        return self._take(torch.zeros(size, dtype=torch.uint8))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full(tuple(tensor.shape), torch.nan, dtype=tensor.dtype)
        source = self.tensor_at(tensor.data_ptr())
        self.ask(lambda: torch.Tensor.copy_(host, alive(source)))
        return host

    def mark(self) -> Any:
        return FakeEvent(self, self._asked)

    def wait(self) -> None:
        self.run(self._asked)

    synchronize = wait

    def empty_cache(self) -> None:
        """There is none."""

    def ask(self, work: Callable[[], object]) -> None:
        """Queue work."""
        assert self.is_current, "asked for outside of the stream"
        with self._lock:
            self._asked += 1
            self._queue.append((self._asked, work))

    def run(self, until: int) -> None:
        """Do the work that was asked for so far.

        Raises:
            RuntimeError: the device is broken.
        """
        with self._lock:
            while self._queue and self._queue[0][0] <= until:
                self._queue.popleft()[1]()
            if self.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def tensor_at(self, address: int) -> weakref.ref[torch.Tensor]:
        """What is in memory there."""
        found = self._memory.get(address)
        assert found is not None and found() is not None, f"nothing is at {address:#x}"  # noqa: PT018
        return found

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.is_current, "memory taken outside of the stream"
        if self.free is not None and tensor.nbytes > self.free:
            raise torch.OutOfMemoryError(f"Tried to allocate {tensor.nbytes} bytes")
        self._memory[tensor.data_ptr()] = weakref.ref(tensor)
        return tensor


def alive(reference: weakref.ref[torch.Tensor]) -> torch.Tensor:
    tensor = reference()
    assert tensor is not None, "memory was let go before the device was done with it"
    return tensor
