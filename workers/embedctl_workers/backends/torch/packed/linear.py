"""Layers with torch's matrix products. The only part of the engine in float32 that imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch

from embedctl_workers.backends.torch.packed.buffers import Buffers, Matrix
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.backends.torch.packed.kernels import Kernels
from embedctl_workers.backends.torch.packed.layers import by_heads, joined_qkv
from embedctl_workers.backends.torch.packed.weights import Layer, Part, Weights

#: Weights are laid out for this number of rows.
_ROWS = 512


class Linear(Protocol):
    """x · Wᵀ + b in float32: rows × in → rows × out. With `gelu`, an exact GELU follows, if the class fuses it."""

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


PRODUCTS: Mapping[str, type[Linear]] = {each.NAME: each for each in (BlasLinear, OneDnnLinear, OneDnnBf16Linear)}


class PlainLayer:
    """A layer with torch's products, and kernels between them."""

    def __init__(self, layer: Layer, weights: Weights, linear: type[Linear], kernels: Kernels) -> None:
        self._kernels = kernels
        self._heads = weights.heads
        self._qkv = linear(*map(torch.as_tensor, joined_qkv(layer, weights.heads)))
        self._out, self._down = _of(layer.out, linear), _of(layer.down, linear)
        self._up = _of(layer.up, linear, gelu=weights.activation is None)
        self._wide = len(layer.up.bias)
        self._activation, self._gelu = weights.activation, weights.activation is None and not linear.FUSES_GELU
        self._attention_norm, self._norm = layer.attention_norm, layer.norm

    def __call__(self, x: Matrix, texts: Texts, buffers: Buffers) -> None:
        tokens, hidden = x.shape
        of_tokens = torch.as_tensor(x)
        context, y, qkv, wide = (
            torch.as_tensor(buffers(name, tokens, width))
            for name, width in (("context", hidden), ("y", hidden), ("qkv", 3 * hidden), ("inner", self._wide))
        )
        self._kernels.attention(by_heads(self._qkv(of_tokens, qkv), self._heads), texts, context)
        self._kernels.add_layer_norm(x, self._out(context, y), self._attention_norm)
        inner = self._up(of_tokens, wide)
        if self._activation is not None:
            inner = self._activation(inner)
        elif self._gelu:
            self._kernels.gelu(inner)
        self._kernels.add_layer_norm(x, self._down(inner, y), self._norm)


def _of(part: Part, linear: type[Linear], *, gelu: bool = False) -> Linear:
    return linear(torch.as_tensor(part.weight), torch.as_tensor(part.bias), gelu=gelu)
