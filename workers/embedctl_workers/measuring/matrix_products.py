"""The rate of a device in large matrix products alone: a model's rate is stated as a share of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from embedctl_config.hardware import HardwareClass, Precision

if TYPE_CHECKING:
    import torch

#: Rows, then rows and columns of the matrix: on a CPU, a product takes about a tenth of a second.
_ON_CPU = (1024, 4096)
_ON_GPU = (8192, 8192)
#: Shortest time of work between two waits (seconds): after a wait, the device idles until it gets more work.
_AT_LEAST_S = 0.05


@dataclass(frozen=True, slots=True)
class MatrixProducts:
    """A large matrix product, to be repeated."""

    what: str  #: precision, sizes and library, for people
    flop: float  #: operations of one product
    multiply: Callable[[], object]  #: computes one product; on a GPU, it only begins one
    wait: Callable[[], None]  #: waits until the device has finished all products that were begun

    def rate(self, seconds: float, *, now: Callable[[], float] = time.perf_counter) -> float:
        """FLOP/s, measured for about `seconds` by the clock `now`."""
        self.multiply()
        self.wait()
        done, at_once = 0, 1
        started = before = now()
        while before - started < seconds:
            for _ in range(at_once):
                self.multiply()
            self.wait()
            done += at_once
            after = now()
            if after - before < _AT_LEAST_S:
                at_once *= 2
            before = after
        return done * self.flop / (before - started)


def matrix_products(hardware: HardwareClass, threads: int) -> MatrixProducts | str:
    """Products on the device of a class, in its precision, on `threads` of a CPU; or the reason why there are none."""
    if hardware.device == "neuron":
        return (
            "there is no plain matrix product to compare with on a Neuron core: everything that runs there is compiled"
        )
    if find_spec("torch") is None:
        return "torch, which multiplies matrices for comparison, is not installed"
    if hardware.device == "cpu":
        return _on_cpu(hardware.precision, threads)
    if hardware.precision == "int8":
        return "there are no products in int8 on a GPU to compare with"
    return _on_gpu(hardware.precision == "fp32")


def _on_cpu(precision: Precision, threads: int) -> MatrixProducts | str:
    """The fastest product that torch has in the precision on this CPU."""
    import torch

    from embedctl_workers.measuring.cpu_products import KINDS, fastest_product, missing

    kind = KINDS[precision]
    if why := missing(kind):
        return why
    torch.set_num_threads(threads)
    rows, width = _ON_CPU
    with torch.inference_mode():
        product, multiply, x = fastest_product(kind, rows, width)

    def again() -> torch.Tensor:
        with torch.inference_mode():
            return multiply(x)

    what = f"{kind}, {rows} × {width} × {width} by torch's {product.name} on {threads} threads"
    return MatrixProducts(what, 2.0 * rows * width**2, again, lambda: None)


def _on_gpu(fp32: bool) -> MatrixProducts | str:
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    # NVIDIA's GPUs before Ampere do not multiply in bf16 in hardware.
    has_bf16 = torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 0)
    kind = torch.float32 if fp32 else torch.bfloat16 if has_bf16 else torch.float16
    rows, width = _ON_GPU
    # Random values: with zeros, a GPU draws less power and is faster.
    weight, x = (torch.randn(size, width, device="cuda", dtype=kind) for size in (width, rows))
    into = torch.empty(rows, width, device="cuda", dtype=kind)
    what = f"{str(kind).removeprefix('torch.')}, {rows} × {width} × {width} by torch"
    return MatrixProducts(what, 2.0 * rows * width**2, partial(torch.mm, x, weight, out=into), torch.cuda.synchronize)
