"""How the layers of an encoder are computed: what the engine asks of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from embedctl_workers.backends.torch.packed.buffers import Buffers, Matrix
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.backends.torch.packed.weights import Floats, Layer, Weights

M = TypeVar("M", bound=Any)

#: One layer, with its weights laid out for one way to compute it. It replaces its first argument, float32, tokens ×
#: hidden, by its output.
EncoderLayer = Callable[[Matrix, Texts, Buffers], None]


@dataclass(frozen=True, slots=True, eq=False)
class LayerKind:
    """One way to compute the layers of an encoder.

    `name` is the last part of the engine's name, for people; `layer` copies a layer's weights, laid out for it;
    `code` names what was compiled for it, as :func:`.compiling.digest_of`; `chosen` tells which others it was compared
    with, and how it fared.
    """

    name: str
    layer: Callable[[Layer, Weights], EncoderLayer]
    code: tuple[str, ...] = ()
    chosen: str = ""


def by_heads(qkv: M, heads: int) -> M:
    """tokens × (3 · hidden), seen as 3 · heads × tokens × head."""
    seen: M = qkv.reshape(len(qkv), 3 * heads, -1).swapaxes(0, 1)
    return seen


def joined_qkv(layer: Layer, heads: int) -> tuple[Floats, Floats]:
    """Weight, 3 · hidden × hidden, and bias of query, key and value; queries scaled by 1/√(size of a head)."""
    query, key, value, scale = layer.query, layer.key, layer.value, np.float32((len(layer.query.bias) // heads) ** -0.5)
    return (
        np.concatenate([query.weight * scale, key.weight, value.weight]),
        np.concatenate([query.bias * scale, key.bias, value.bias]),
    )
