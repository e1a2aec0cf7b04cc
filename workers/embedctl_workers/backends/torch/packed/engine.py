"""Runs the encoder on a batch without padding: all tokens of the batch are rows of one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from embedctl_config.outputs import PLAIN, Output
from embedctl_workers.arrays.outputs import Computed
from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.torch.packed.buffers import Array, Buffers
from embedctl_workers.backends.torch.packed.inputs import Packed, Tables, Texts, packed_texts
from embedctl_workers.backends.torch.packed.kernels import Kernels
from embedctl_workers.backends.torch.packed.layers import LayerKind
from embedctl_workers.backends.torch.packed.modules import Rest
from embedctl_workers.backends.torch.packed.weights import Weights

if TYPE_CHECKING:
    from embedctl_workers.backends.torch.packed.heads import Head


class PackedEngine:
    """Runs an encoder of the BERT family on packed tokens. Between the layers, values are float32.

    The layers' weights are copied, and then dropped; `rest` turns the vectors of tokens into the vector of a text.
    """

    def __init__(self, weights: Weights, rest: Rest, kernels: Kernels, kind: LayerKind) -> None:
        self._weights = weights
        self._rest = rest
        self._kernels = kernels
        self._tables = Tables(weights.words, weights.places, weights.norm)
        self._buffers = Buffers()
        self._layers = [kind.layer(layer, weights) for layer in weights.layers]
        weights.layers.clear()
        self.name = f"packed, {kind.name}"
        #: What makes outputs other than the vectors of texts of the states of tokens.
        self.heads: Mapping[Output, Head] = {}

    def __call__(self, tokens: Tokens, rows: Rows) -> Computed:
        """Vectors of some of the texts, rows × dim, or by output what the texts ask for; IndexError if the model has no
        embedding for a token or place."""
        weights = self._weights
        packed = packed_texts(tokens, rows, (len(weights.words), len(weights.places)), weights.padding_id)
        texts = Texts.at(packed.offsets)
        if mask := tokens.columns.get("attention_mask"):
            texts = replace(texts, attended=np.add.reduceat(mask.select(rows).values, packed.offsets[:-1]))
        states = self._encode(packed, texts)
        if tokens.outputs == PLAIN:
            return self._rest(states, packed.offsets, tokens.prompt_tokens)
        return {
            output: self.heads[output](states, tokens, rows)
            if output in self.heads
            else self._rest(states, packed.offsets, tokens.prompt_tokens)
            for output in tokens.outputs
        }

    def _encode(self, packed: Packed, texts: Texts) -> Array:
        """The last hidden state of every token, tokens × hidden; valid until the next call."""
        x = self._buffers("x", len(packed.ids), self._tables.words.shape[1])
        self._kernels.embed(packed.ids, packed.positions, self._tables, x)
        for layer in self._layers:
            layer(x, texts, self._buffers)
        return x
