"""How the layers of an encoder are computed: what the engine asks of them, and the way in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.kernels import Kernels, Norm, Texts
from embedctl_workers.backends.torch.packed.linear import Linear
from embedctl_workers.backends.torch.packed.weights import Layer, Weights

#: One layer, with its weights laid out for one way to compute it. It replaces its first argument, float32, tokens ×
#: hidden, by its output.
EncoderLayer = Callable[[torch.Tensor, Texts, Buffers], None]


@dataclass(frozen=True, slots=True, eq=False)
class LayerKind:
    """One way to compute the layers of an encoder.

    `name` is the last part of the engine's name, for people; `layer` copies a layer's weights, laid out for it;
    `chosen` tells which others it was compared with, and how it fared.
    """

    name: str
    layer: Callable[[Layer, Weights], EncoderLayer]
    chosen: str = ""


def plain_layers(linear: type[Linear], kernels: Kernels) -> LayerKind:
    """Products by torch, and kernels between them."""
    return LayerKind(f"{kernels.name}, {linear.NAME}", partial(_PlainLayer, linear=linear, kernels=kernels))


class _PlainLayer:
    def __init__(self, layer: Layer, weights: Weights, linear: type[Linear], kernels: Kernels) -> None:
        self._kernels = kernels
        self._heads = weights.heads
        self._qkv = linear(*joined_qkv(layer, weights.heads))
        self._out = linear(*joined((layer.out, 1.0)))
        self._attention_norm = Norm(layer.attention_norm)
        self._up = linear(*joined((layer.up, 1.0)), gelu=weights.activation is None)
        self._wide = layer.up.out_features
        self._activation = weights.activation or (None if linear.FUSES_GELU else kernels.gelu)
        self._down = linear(*joined((layer.down, 1.0)))
        self._norm = Norm(layer.norm)

    def __call__(self, x: torch.Tensor, texts: Texts, buffers: Buffers) -> None:
        tokens, hidden = x.shape
        context, y = buffers("context", tokens, hidden), buffers("y", tokens, hidden)
        qkv = self._qkv(x, buffers("qkv", tokens, 3 * hidden))
        self._kernels.attention(by_heads(qkv, self._heads), texts, context)
        self._kernels.add_layer_norm(x, self._out(context, y), self._attention_norm)
        inner = self._up(x, buffers("inner", tokens, self._wide))
        if self._activation is not None:
            inner = self._activation(inner)
        self._kernels.add_layer_norm(x, self._down(inner, y), self._norm)


def by_heads(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """tokens × (3 · hidden), seen as 3 · heads × tokens × head."""
    return qkv.view(len(qkv), 3 * heads, -1).transpose(0, 1)


def joined_qkv(layer: Layer, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight, 3 · hidden × hidden, and bias of query, key and value, float32; queries scaled by 1/√(size of a head)."""
    scale = float((layer.query.out_features // heads) ** -0.5)
    return joined((layer.query, scale), (layer.key, 1.0), (layer.value, 1.0))


def joined(*parts: tuple[torch.nn.Linear, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of linear layers side by side, each scaled, float32."""
    return (
        torch.cat([module.weight.detach().float() * scale for module, scale in parts]),
        torch.cat([module.bias.detach().float() * scale for module, scale in parts]),
    )
