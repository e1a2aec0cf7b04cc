"""Opens the vendor's package and the GPU that it runs on, or says in one line what is missing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from embedctl_config.errors import MissingExtra, WorkerError
from embedctl_workers.backends.gpu.device import Event, open_gpu, watched

log = logging.getLogger(__name__)

_LEVELS = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}
_INSTALL = "install tensorrt with its libraries from the vendor's index (docs/tensorrt.md has the lines)"


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


@dataclass(frozen=True, slots=True)
class Runtime:
    """The package and the device that plans are built and run with; the package's logger keeps the last errors."""

    trt: Any  # it has no types
    device: CudaDevice
    log: Any  # a subclass of one of the vendor's classes

    @property
    def version(self) -> str:
        return str(self.trt.__version__)

    @property
    def last_errors(self) -> str:
        return "; ".join(self.log.errors) or "TensorRT does not say why"


def open_runtime() -> Runtime:
    """Open the GPU and the vendor's package; raises as :func:`load_vendor`, and a WorkerError if there is no GPU."""
    # The GPU comes first: without a driver, the vendor's functions return null pointers, or worse.
    device = CudaDevice()
    trt = load_vendor()
    return Runtime(trt, device, make_log(trt))


def load_vendor() -> Any:
    """Import the vendor's package, or raise MissingExtra; a WorkerError if it is a placeholder or broken."""
    try:
        trt = import_module("tensorrt")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt":
            raise MissingExtra("tensorrt", "backend 'tensorrt'") from error
        raise WorkerError(f"the package tensorrt is here without {error.name}: {_INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:
        line = str(error).partition("\n")[0][:200]
        raise WorkerError(f"the package tensorrt can't be loaded ({line}): {_INSTALL}") from error
    if not hasattr(trt, "Builder") or not hasattr(trt, "OnnxParser"):
        raise WorkerError(f"the package tensorrt that is installed is a placeholder: {_INSTALL}")
    return trt


def make_log(trt: Any) -> Any:
    """A logger for the vendor's package that writes to our log."""

    class Log(trt.ILogger):  # type: ignore[misc]  # the vendor's package has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=3)

        def log(self, severity: Any, message: str) -> None:
            level = _LEVELS.get(severity.name, logging.DEBUG)
            if level >= logging.ERROR:
                self.errors.append(message.strip())
            log.log(level, "TensorRT: %s", message)

    return Log()
