"""x · Wᵀ + b, by torch's matrix products."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

#: Weights are laid out for this number of rows.
_ROWS = 512


class Linear(Protocol):
    """A linear layer in float32: rows × in → rows × out. With `gelu`, an exact GELU follows, if the class fuses it."""

    #: For people.
    NAME: ClassVar[str]
    #: Whether the layer itself applies GELU on request.
    FUSES_GELU: ClassVar[bool]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> None: ...

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The output: in `out`, if the product can write there, or in new memory."""


class BlasLinear:
    """BLAS on the transposed weight: MKL in torch's wheels for x86."""

    NAME: ClassVar[str] = "BLAS"
    FUSES_GELU: ClassVar[bool] = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> None:
        self._weight = weight.t().contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.addmm(self._bias, x, self._weight, out=out)


class OneDnnLinear:
    """oneDNN on a weight laid out for it beforehand, with bias and GELU in the same pass.

    torch's own compiler emits the same operators (torch/_inductor/mkldnn_lowerings.py). They are not a public
    interface, so :class:`.choosing.Chooser` checks that they exist and compute correctly.
    """

    NAME: ClassVar[str] = "oneDNN"
    FUSES_GELU: ClassVar[bool] = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        self._bias = bias
        self._activation: tuple[str, list[float], str] = ("gelu", [], "none") if gelu else ("none", [], "")

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, *self._activation)
        return y


class OneDnnBf16Linear:
    """oneDNN in bf16 on weights laid out for it: input and output are float32, and rounded on the way."""

    NAME: ClassVar[str] = "oneDNN bf16"
    FUSES_GELU: ClassVar[bool] = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> None:
        self._product = OneDnnLinear(weight.bfloat16(), bias.bfloat16(), gelu=gelu)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = self._product(x.bfloat16())
        return y.float() if out is None else out.copy_(y)
