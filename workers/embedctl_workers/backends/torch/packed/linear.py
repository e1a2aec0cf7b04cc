"""x · Wᵀ + b, by whichever of torch's matrix products is fastest on this machine."""

from __future__ import annotations

import time
from typing import ClassVar, Protocol

import torch

#: Rows for which weights are laid out, and with which the products are compared.
_ROWS = 512
_ROUNDS = 5
_TOLERANCE = 1e-3


class Linear(Protocol):
    """A linear layer of float32, with an exact GELU behind it where `gelu` and it can: rows × in → rows × out."""

    #: For people.
    NAME: ClassVar[str]
    #: Whether it applies GELU itself when asked for.
    FUSES_GELU: ClassVar[bool]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class BlasLinear:
    """BLAS on the transposed weight: MKL in torch's wheels for x86."""

    NAME: ClassVar[str] = "BLAS"
    FUSES_GELU: ClassVar[bool] = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> None:
        self._weight = weight.t().contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self._bias, x, self._weight)


class OneDnnLinear:
    """oneDNN on a weight laid out for it beforehand, with bias and GELU in the same pass.

    The operators are those that torch's own compiler emits (torch/_inductor/mkldnn_lowerings.py). They are no public
    interface: :func:`fastest_linear` makes sure that they are there and right.
    """

    NAME: ClassVar[str] = "oneDNN"
    FUSES_GELU: ClassVar[bool] = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        self._bias = bias
        self._activation: tuple[str, list[float], str] = ("gelu", [], "none") if gelu else ("none", [], "")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, *self._activation)
        return y


def fastest_linear(weight: torch.Tensor) -> type[Linear]:
    """The product that is fastest here on a weight of this shape, out × in, among those that give what torch gives.

    MKL takes slower ways on CPUs that are not Intel's; oneDNN does not.
    """
    with torch.inference_mode():
        x, bias = torch.ones(_ROWS, weight.shape[1]), torch.zeros(weight.shape[0])
        expected = torch.nn.functional.linear(x, weight, bias)
        seconds: dict[type[Linear], float] = {BlasLinear: _seconds(BlasLinear(weight, bias), x)}
        try:
            product = OneDnnLinear(weight, bias)
            if torch.allclose(product(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                seconds[OneDnnLinear] = _seconds(product, x)
        except (AttributeError, RuntimeError):  # torch was built without oneDNN, or changed the operators
            pass
    return min(seconds, key=seconds.__getitem__)


def _seconds(product: Linear, x: torch.Tensor) -> float:
    product(x)
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - started)
    return min(times)
