"""Runs the encoder on a batch without padding: all tokens of the batch are rows of one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from embedctl_config.outputs import PLAIN, Output
from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.heads import Head
from embedctl_workers.backends.torch.packed.inputs import Packed, packed_texts
from embedctl_workers.backends.torch.packed.kernels import Kernels, Norm, Tables, Texts
from embedctl_workers.backends.torch.packed.layers import LayerKind
from embedctl_workers.backends.torch.packed.weights import Weights


class PackedEngine:
    """Runs an encoder of the BERT family on packed tokens. Between the layers, values are float32.

    The layers' weights are copied, and then freed; `rest` are the modules that turn the vectors of tokens into the
    vector of a text.
    """

    def __init__(self, weights: Weights, rest: list[torch.nn.Module], kernels: Kernels, kind: LayerKind) -> None:
        self._weights = weights
        self._rest = rest
        self._kernels = kernels
        self._tables = Tables(weights.words, weights.places, Norm(weights.norm))
        self._buffers = Buffers()
        self._layers = [kind.layer(layer, weights) for layer in weights.layers]
        weights.free_layers()
        self.name = f"packed, {kind.name}"
        #: What makes outputs other than the vectors of texts of the states of tokens.
        self.heads: Mapping[Output, Head] = {}

    def __call__(self, tokens: Tokens, rows: Rows) -> torch.Tensor | dict[Output, Any]:
        """Vectors of some of the texts, rows × dim, or by output what the texts ask for; IndexError if the model has no
        embedding for a token or place."""
        packed = packed_texts(tokens, rows, self._weights)
        states = self._encode(packed)
        if tokens.outputs == PLAIN:
            return self._vectors(states, packed, tokens)
        return {
            output: self.heads[output](states, packed, tokens, rows)
            if output in self.heads
            else self._vectors(states, packed, tokens)
            for output in tokens.outputs
        }

    def _vectors(self, states: torch.Tensor, packed: Packed, tokens: Tokens) -> torch.Tensor:
        features: dict[str, Any] = {
            "token_embeddings": states[None],
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
