"""Runs the encoder on a batch without padding: all tokens of the batch are rows of one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.inputs import Packed, packable, packed_texts
from embedctl_workers.backends.torch.packed.kernels import Kernels, Norm, Tables, Texts, load_kernels
from embedctl_workers.backends.torch.packed.layers import LayerKind
from embedctl_workers.backends.torch.packed.weights import Weights
from embedctl_workers.machine.host import Host

#: Chooses how the layers of a model are computed, with these kernels beside them.
Choose = Callable[[Weights, Kernels, Host], LayerKind]


def packed_engine(model: SentenceTransformer, host: Host, choose: Choose) -> PackedEngine | None:
    """An engine for a model of the BERT family; None for any other. It takes over the transformer's weights."""
    found = packable(model)
    if found is None:
        return None
    weights, rest = found
    kernels = load_kernels(host)
    return taken_over(model, PackedEngine(weights, rest, kernels, choose(weights, kernels, host)))


def taken_over(model: SentenceTransformer, engine: PackedEngine) -> PackedEngine:
    """The engine, after the memory of the transformer's own weights is freed."""
    transformer: Any = model[0]
    for parameter in transformer.auto_model.parameters():
        parameter.data = torch.empty(0)
    return engine


class PackedEngine:
    """Runs an encoder of the BERT family on packed tokens. Between the layers, values are float32.

    The weights are copied; `rest` are the modules that turn the vectors of tokens into the vector of a text.
    """

    def __init__(self, weights: Weights, rest: list[torch.nn.Module], kernels: Kernels, kind: LayerKind) -> None:
        self._weights = weights
        self._rest = rest
        self._kernels = kernels
        self._tables = Tables(weights.words, weights.places, Norm(weights.norm))
        self._buffers = Buffers()
        self._layers = [kind.layer(layer, weights) for layer in weights.layers]
        self.name = f"packed, {kind.name}"

    def __call__(self, tokens: Tokens, rows: Rows) -> torch.Tensor:
        """Vectors of some of the texts, rows × dim; IndexError if the model has no embedding for a token or place."""
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
        return vectors.clone() if self._buffers.hold(vectors) else vectors

    def _encode(self, packed: Packed) -> torch.Tensor:
        """The last hidden state of every token, tokens × hidden; valid until the next call."""
        texts = Texts.at(packed.offsets)
        ids, positions = torch.from_numpy(packed.ids), torch.from_numpy(packed.positions)
        x = self._buffers("x", len(ids), self._tables.words.shape[1])
        self._kernels.embed(ids, positions, self._tables, x)
        for layer in self._layers:
            layer(x, texts, self._buffers)
        return x
