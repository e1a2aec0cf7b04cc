"""Runs the encoder on a batch without padding: all tokens of the batch are rows of one matrix."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.torch.packed.inputs import Packed, packable, packed_texts
from embedctl_workers.backends.torch.packed.kernels import Kernels, Norm, load_kernels
from embedctl_workers.backends.torch.packed.linear import Linear, fastest_linear
from embedctl_workers.backends.torch.packed.weights import Layer, Weights
from embedctl_workers.machine.host import Host


def packed_engine(model: SentenceTransformer, host: Host) -> PackedEngine | None:
    """An engine for a model of the BERT family; None for any other. It takes over the transformer's weights."""
    found = packable(model)
    if found is None:
        return None
    engine = PackedEngine(*found, load_kernels(host))
    transformer: Any = model[0]
    for parameter in transformer.auto_model.parameters():
        parameter.data = torch.empty(0)
    return engine


class PackedEngine:
    """Runs an encoder of the BERT family on packed tokens, float32.

    Args:
        weights: copied.
        rest: the modules that turn the vectors of tokens into the vector of a text.
    """

    def __init__(self, weights: Weights, rest: list[torch.nn.Module], kernels: Kernels) -> None:
        self._weights = weights
        self._rest = rest
        self._kernels = kernels
        self._norm = Norm(weights.norm)
        linear = fastest_linear(weights.layers[0].up.weight.detach().float())
        self._layers = [_PackedLayer(layer, weights, linear, kernels) for layer in weights.layers]
        self.name = f"packed, {kernels.name}, {linear.NAME}"

    def __call__(self, tokens: Tokens, rows: Rows) -> torch.Tensor:
        """Vectors of some of the texts, rows × dim.

        Raises:
            IndexError: the model has no embedding for a token or a position.
        """
        packed = packed_texts(tokens, rows, self._weights)
        features: dict[str, Any] = {
            "token_embeddings": self._encode(packed)[None],
            "cu_seq_lens_q": torch.from_numpy(packed.offsets),
        }
        if tokens.prompt_tokens is not None:
            features["prompt_length"] = tokens.prompt_tokens
        for module in self._rest:
            features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def _encode(self, packed: Packed) -> torch.Tensor:
        """The last hidden state of every token, tokens × hidden."""
        weights = self._weights
        at = torch.from_numpy(packed.offsets)
        x = self._kernels.embed(
            torch.from_numpy(packed.ids), torch.from_numpy(packed.positions), weights.words, weights.places, self._norm
        )
        context = torch.empty_like(x)
        for layer in self._layers:
            layer(x, at, context)
        return x


class _PackedLayer:
    def __init__(self, layer: Layer, weights: Weights, linear: type[Linear], kernels: Kernels) -> None:
        self._kernels = kernels
        self._heads = weights.heads
        scale = (layer.query.out_features // weights.heads) ** -0.5
        self._qkv = linear(*_joined((layer.query, scale), (layer.key, 1.0), (layer.value, 1.0)))
        self._out = linear(*_joined((layer.out, 1.0)))
        self._attention_norm = Norm(layer.attention_norm)
        self._up = linear(*_joined((layer.up, 1.0)), gelu=weights.activation is None)
        self._activation = weights.activation or (None if linear.FUSES_GELU else kernels.gelu)
        self._down = linear(*_joined((layer.down, 1.0)))
        self._norm = Norm(layer.norm)

    def __call__(self, x: torch.Tensor, offsets: torch.Tensor, context: torch.Tensor) -> None:
        """Replace `x`, tokens × hidden, by the layer's output; `context` is scratch of the same shape."""
        self._kernels.attention(self._qkv(x), offsets, self._heads, context)
        self._kernels.add_layer_norm(x, self._out(context), self._attention_norm)
        inner = self._up(x)
        if self._activation is not None:
            inner = self._activation(inner)
        self._kernels.add_layer_norm(x, self._down(inner), self._norm)


def _joined(*parts: tuple[torch.nn.Linear, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of linear layers side by side, each scaled."""
    return (
        torch.cat([module.weight.detach().float() * scale for module, scale in parts]),
        torch.cat([module.bias.detach().float() * scale for module, scale in parts]),
    )
