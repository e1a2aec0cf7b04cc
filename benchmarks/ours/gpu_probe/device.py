"""The device that is probed, and how work on it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from benchmarks.ours.gpu_models import MINILM

from embedctl_bench.measuring.shapes import SHAPES, ModelShape
from embedctl_workers.backends.gpu.device import Gpu, open_gpu

_WARM_UPS = 3
_ROUNDS = 10
#: Of the device's clock: some 20 ms.
_HEAD_START_CYCLES = 40_000_000
_TOY = ModelShape("bert", layers=2, hidden=64, heads=2, pooling="mean")


@dataclass(frozen=True, slots=True)
class Probed:
    """A device and the sizes that suit it.

    Attributes:
        gpu: as the engines take it.
        trial: whether it is the CPU in place of a GPU.
        dtype: of weights and activations.
        tokens: of a batch, where a section takes one size.
        sizes: of batches in tokens, where it takes several.
        shapes: of models, the largest last.
    """

    gpu: Gpu
    trial: bool
    dtype: torch.dtype
    tokens: int
    sizes: tuple[int, ...]
    shapes: Mapping[str, ModelShape]

    @property
    def device(self) -> torch.device:
        """Where tensors are put."""
        return self.gpu.device

    @property
    def name(self) -> str:
        """For people: the device's model and its libraries."""
        if self.trial:
            return "the CPU: **a trial of the code, not of a GPU**"
        flash = torch.backends.cuda.is_flash_attention_available()
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch has no types for it
        return f"{self.gpu.name}, cuDNN {version}, flash attention: {flash}"

    @property
    def largest(self) -> str:
        """The name of the largest model."""
        return list(self.shapes)[-1]

    def randn(self, *shape: int) -> torch.Tensor:
        """Random numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def computing(self) -> AbstractContextManager[object]:
        """A context: work that is begun inside it runs on a stream of its own, as a worker's does."""
        return nullcontext() if self.trial else self.gpu.on(self.gpu.stream())

    def synchronize(self) -> None:
        """Wait for everything."""
        self.gpu.synchronize()

    def device_ms(self, work: Callable[[], object]) -> float:
        """The median time that the device takes for some work, in ms. The host must queue it within 20 ms."""
        for _ in range(_WARM_UPS):
            work()
        self.synchronize()
        return median(self._once_ms(work) for _ in range(_ROUNDS))

    def host_ms(self, work: Callable[[], object]) -> float:
        """The median time until some work is queued on an idle device, in ms. On the CPU, until it is done."""
        work()
        taken = []
        for _ in range(_ROUNDS):
            self.synchronize()
            taken.append(wall_ms(work))
        self.synchronize()
        return median(taken)

    def _once_ms(self, work: Callable[[], object]) -> float:
        if self.trial:
            return wall_ms(work)
        began, ended = _event(), _event()
        # While the device is busy with this, the host queues all of the work: its own time is not part of the device's.
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # torch has no types for it
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))


class NotHereError(Exception):
    """Raised where the CPU, or this GPU, can't take part; the message says why."""


def wall_ms(work: Callable[[], object]) -> float:
    """The time that a call takes, in ms."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def open_probed(*, trial: bool) -> Probed:
    """The GPU that this process sees, or the CPU for a trial.

    Raises:
        WorkerError: torch can use no GPU.
    """
    if trial:
        torch.set_num_threads(1)  # toy sizes are no work for several
        # All that the engines ask of a device, apart from tensors on it.
        cpu = SimpleNamespace(device=torch.device("cpu"), name="CPU", varlen=False, synchronize=lambda: None)
        return Probed(cast(Gpu, cpu), True, torch.float32, 256, (128, 256), {"toy": _TOY})
    shapes = {"minilm": MINILM, "base": SHAPES["bge-base-shape"], "large": SHAPES["bge-large-shape"]}
    sizes = tuple(4096 << step for step in range(6))
    return Probed(open_gpu(), False, torch.bfloat16, 32_768, sizes, shapes)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
