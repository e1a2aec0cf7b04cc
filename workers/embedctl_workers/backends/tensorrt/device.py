"""The parts of this process's GPU that a plan needs: memory, a stream, events. Through torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from embedctl_config.errors import WorkerError
from embedctl_workers.backends.gpu.device import Event, open_gpu, watched


class CudaDevice:
    """The first GPU that torch sees, with one stream: all work requested here is done in it, in the order requested.

    `name` is its model, such as `NVIDIA A10G`, `capability` its compute capability, such as `8.6`, and `stream` the
    handle that the vendor's functions take. A WorkerError if this torch sees no usable GPU, or is built for AMD's GPUs.
    """

    def __init__(self) -> None:
        if torch.version.hip is not None:
            raise WorkerError(
                f"TensorRT runs on NVIDIA's GPUs, and torch {torch.__version__} is built for ROCm: use a class with "
                'backend = "torch-gpu"'
            )
        self._gpu = open_gpu()
        facts: Any = torch.cuda.get_device_properties(self._gpu.device)
        self.name = self._gpu.name
        self.capability = f"{facts.major}.{facts.minor}"
        self._stream = cast(torch.cuda.Stream, self._gpu.stream())
        self.stream = int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[object]:
        """A context: what this thread requests of torch inside it is done in the stream."""
        return torch.cuda.stream(self._stream)

    def watched(self) -> AbstractContextManager[object]:
        """A context that classifies errors of the device, as :func:`embedctl_workers.backends.gpu.device.watched`."""
        return watched(self._gpu)

    def put(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """A contiguous copy on the device, perhaps not finished yet."""
        return torch.from_numpy(array).pin_memory().to(self._gpu.device, non_blocking=True)

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Memory of the device for float32."""
        return torch.empty(*shape, dtype=torch.float32, device=self._gpu.device)

    def scratch(self, size: int) -> torch.Tensor:
        """Memory of the device for some bytes, aligned to 256 bytes."""
        return torch.empty(size, dtype=torch.uint8, device=self._gpu.device)  # torch aligns all blocks to 512 bytes

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, perhaps not finished yet."""
        return self._gpu.pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)

    def mark(self) -> Event:
        """An event at the end of all work requested so far."""
        event = self._gpu.event()
        event.record(self._stream)
        return event

    def wait(self) -> None:
        self._stream.synchronize()
