"""Layers whose products are oneDNN's in bf16, with attention on tiles between them."""

from __future__ import annotations

from functools import partial

import torch

from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.kernels import Kernels, Norm, Texts
from embedctl_workers.backends.torch.packed.layers import LayerKind, joined
from embedctl_workers.backends.torch.packed.linear import OneDnnBf16Linear, OneDnnLinear
from embedctl_workers.backends.torch.packed.tiles import TileAttention, Tiles, filled_up
from embedctl_workers.backends.torch.packed.weights import Layer, Weights


def onednn_bf16_layers(tiles: Tiles, kernels: Kernels) -> LayerKind:
    """What one operation gives the next stays in bf16; sums, GELU, softmax and LayerNorm are in float32.

    The tiles are for attention, the kernels for LayerNorm.
    """
    name = f"{kernels.name}, {OneDnnBf16Linear.NAME}, attention on {tiles.unit.name}"
    return LayerKind(name, partial(_OneDnnBf16Layer, tiles=tiles, kernels=kernels))


class _OneDnnBf16Layer:
    def __init__(self, layer: Layer, weights: Weights, tiles: Tiles, kernels: Kernels) -> None:
        heads = weights.heads
        self._kernels = kernels
        self._attention = TileAttention(tiles, heads, layer.query.out_features // heads, parts=1)
        qkv, out = filled_up(layer, heads)
        self._qkv, self._out = _product(*qkv), _product(*out)
        self._attention_norm = Norm(layer.attention_norm)
        self._up = _product(*joined((layer.up, 1.0)), gelu=True)
        self._down = _product(*joined((layer.down, 1.0)))
        self._norm = Norm(layer.norm)

    def __call__(self, x: torch.Tensor, texts: Texts, buffers: Buffers) -> None:
        tokens, hidden = x.shape
        rounded, y = buffers("rounded", tokens, hidden, torch.bfloat16), buffers("y", tokens, hidden)
        context = buffers("context", tokens, self._attention.width, torch.bfloat16)
        self._attention(self._qkv(rounded.copy_(x)), texts, context, buffers)
        self._kernels.add_layer_norm(x, y.copy_(self._out(context)), self._attention_norm)
        inner = self._up(rounded.copy_(x))
        self._kernels.add_layer_norm(x, y.copy_(self._down(inner)), self._norm)


def _product(weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> OneDnnLinear:
    return OneDnnLinear(weight.bfloat16(), bias.bfloat16(), gelu=gelu)
