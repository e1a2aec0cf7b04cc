"""A batch through the encoder, without padding: all its tokens are the rows of one matrix."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from embedctl_workers.backends.base import Host, Rows, Tokens
from embedctl_workers.packed.kernels import Kernels, Norm, load_kernels
from embedctl_workers.packed.linear import Linear, fastest_linear
from embedctl_workers.packed.weights import Layer, Weights, weights_of


def packed_engine(model: SentenceTransformer, host: Host) -> PackedEngine | None:
    """An engine for a model of the BERT family; None for any other. It takes the transformer's weights over.

    Pooling and what follows are the model's own modules, which know packed tokens by `cu_seq_lens_q`.
    """
    transformer, *rest = model
    if type(transformer) is not Transformer or not all(type(each) in (Pooling, Normalize, Dense) for each in rest):
        return None
    if transformer.query_expansion is not None or not hasattr(Pooling, "_forward_flattened"):
        return None
    if any(transformer.tokenizer.backend_tokenizer.encode("a").type_ids):
        return None
    weights = weights_of(transformer.auto_model)
    if weights is None:
        return None
    engine = PackedEngine(weights, rest, load_kernels(host))
    for parameter in transformer.auto_model.parameters():
        parameter.data = torch.empty(0)
    return engine


class PackedEngine:
    """Runs an encoder of the BERT family on packed tokens, float32.

    Args:
        weights: copied.
        rest: what makes a text's vector of its tokens'.
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
            IndexError: a token or a position that the model has no embedding for.
        """
        lengths = tokens.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        column = tokens.columns["input_ids"]
        ids = np.fromiter(chain.from_iterable(column[row] for row in rows), np.int64, count=int(offsets[-1]))
        features: dict[str, Any] = {
            "token_embeddings": self._encode(ids, offsets)[None],
            "cu_seq_lens_q": torch.from_numpy(offsets),
        }
        if tokens.prompt_tokens is not None:
            features["prompt_length"] = tokens.prompt_tokens
        for module in self._rest:
            features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def _encode(self, ids: Rows, offsets: Rows) -> torch.Tensor:
        """The last hidden state of every token, tokens × hidden."""
        weights = self._weights
        positions = _positions(ids, offsets, weights.padding_id)
        for found, table in ((ids, weights.words), (positions, weights.places)):
            if not 0 <= found.min() <= found.max() < len(table):
                raise IndexError(f"an index of {found.max()} into a table of {len(table)} embeddings")
        at = torch.from_numpy(offsets)
        x = self._kernels.embed(
            torch.from_numpy(ids), torch.from_numpy(positions), weights.words, weights.places, self._norm
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


def _positions(ids: Rows, offsets: Rows, padding_id: int | None) -> Rows:
    lengths = np.diff(offsets)
    if padding_id is None:
        return np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    real = ids != padding_id
    before = np.concatenate([[0], np.cumsum(real)])
    positions: Rows = (before[1:] - np.repeat(before[offsets[:-1]], lengths)) * real + padding_id
    return positions
