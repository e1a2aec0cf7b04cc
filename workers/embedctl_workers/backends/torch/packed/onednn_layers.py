"""Layers whose products are oneDNN's in bf16, with attention on tiles between them."""

from __future__ import annotations

import torch

from embedctl_workers.backends.torch.packed.buffers import Buffers, Matrix
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.backends.torch.packed.kernels import Kernels
from embedctl_workers.backends.torch.packed.linear import OneDnnLinear
from embedctl_workers.backends.torch.packed.tiles import BF16, TileAttention, Tiles, filled_up
from embedctl_workers.backends.torch.packed.weights import Floats, Layer, Weights


class OneDnnBf16Layer:
    """What one operation gives the next stays in bf16; sums, GELU, softmax and LayerNorm are in float32.

    The tiles are for attention, the kernels for LayerNorm.
    """

    def __init__(self, layer: Layer, weights: Weights, tiles: Tiles, kernels: Kernels) -> None:
        heads = weights.heads
        self._kernels = kernels
        self._attention = TileAttention(tiles, heads, len(layer.query.bias) // heads, parts=1)
        qkv, out = filled_up(layer, heads)
        self._qkv, self._out = _product(*qkv), _product(*out)
        self._up = _product(layer.up.weight, layer.up.bias, gelu=True)
        self._down = _product(layer.down.weight, layer.down.bias)
        self._attention_norm, self._norm = layer.attention_norm, layer.norm

    def __call__(self, x: Matrix, texts: Texts, buffers: Buffers) -> None:
        tokens, hidden = x.shape
        of_tokens, y = torch.as_tensor(x), torch.as_tensor(buffers("y", tokens, hidden))
        rounded, context = (
            torch.as_tensor(buffers(name, tokens, width, BF16)).view(torch.bfloat16)
            for name, width in (("rounded", hidden), ("context", self._attention.width))
        )
        self._attention(self._qkv(rounded.copy_(of_tokens)), texts, context, buffers)
        self._kernels.add_layer_norm(x, y.copy_(self._out(context)), self._attention_norm)
        inner = self._up(rounded.copy_(of_tokens))
        self._kernels.add_layer_norm(x, y.copy_(self._down(inner)), self._norm)


def _product(weight: Floats, bias: Floats, *, gelu: bool = False) -> OneDnnLinear:
    return OneDnnLinear(torch.as_tensor(weight).bfloat16(), torch.as_tensor(bias).bfloat16(), gelu=gelu)
