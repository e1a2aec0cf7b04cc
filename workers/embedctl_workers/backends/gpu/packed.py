"""Encoders of the BERT family on packed tokens, in 16 or 32 bits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from embedctl_config.outputs import Output
from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.gpu.attention import Attention, AttentionPlan, Bucketed, attention_for
from embedctl_workers.backends.gpu.device import Gpu
from embedctl_workers.backends.gpu.pooling import HostIndexedPooling
from embedctl_workers.backends.gpu.transfer import Batch
from embedctl_workers.backends.torch.packed.inputs import packed_texts
from embedctl_workers.backends.torch.packed.weights import Layer, Part, Weights


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of a batch beside its arrays."""

    plan: AttentionPlan
    prompt_tokens: int | None
    outputs: tuple[Output, ...]


class PackedGpuEngine:
    """Runs an encoder of the BERT family on packed tokens. Pooling and everything after it run in float32.

    Args:
        weights: the model's, float32; copied.
        rest: the model's own modules that turn tokens' vectors into a text's vector, on the device in float32.
        heads: what makes the other outputs; copied.
    """

    def __init__(
        self,
        weights: Weights,
        rest: list[torch.nn.Module],
        heads: Mapping[Output, Any],
        device: Gpu,
        dtype: torch.dtype,
    ) -> None:
        self._rest = [HostIndexedPooling.like(module) for module in rest]
        self._pooling = next((module for module in self._rest if isinstance(module, HostIndexedPooling)), None)
        self._heads = {output: copy.deepcopy(head).to(device.device) for output, head in heads.items()}
        hidden = weights.words.shape[1]
        self._attention = attention_for(device, dtype, weights.heads, hidden // weights.heads)
        self._norm = _Norm(weights.norm, device.device, torch.float32)
        self._dtype = dtype
        self._stack = _Stack(weights, self._attention, device.device, dtype)
        # The layers are dropped, and the tables stay on the device only: the host's copies are large.
        self._words, self._places = (
            torch.from_numpy(table).to(device.device, dtype) for table in (weights.words, weights.places)
        )
        self._padding_id = weights.padding_id
        self.name = f"packed, {self._attention.NAME}"

    def batch(self, tokens: Tokens, rows: Rows) -> Batch:
        """Prepare some of the texts on the host; IndexError if the model has no embedding for a token or a position."""
        packed = packed_texts(tokens, rows, (len(self._words), len(self._places)), self._padding_id)
        plan = self._attention.plan(packed.offsets)
        lengths = np.diff(packed.offsets)
        arrays = {**plan.arrays, "ids": packed.ids, "places": packed.positions, "offsets": packed.offsets}
        if self._pooling is not None:
            arrays |= self._pooling.indices(lengths, tokens.prompt_tokens)
        else:
            arrays["text"] = np.repeat(np.arange(len(lengths)), lengths)
        return Batch(arrays, _Facts(plan, tokens.prompt_tokens, tokens.outputs))

    def run(self, inputs: Mapping[str, torch.Tensor], facts: _Facts) -> dict[Output, torch.Tensor]:
        """What the texts ask for, float32, on the device, as :func:`~embedctl_workers.arrays.outputs.computed_of` takes
        it; dense vectors are normalised only if the model does so. Inputs are int32."""
        states, texts = self._encoded(inputs, facts.plan).float(), len(inputs["offsets"]) - 1
        return {
            output: self._heads[output].numbers(states, inputs["text"], texts)
            if output in self._heads
            else self._pooled(states, inputs, facts)
            for output in facts.outputs
        }

    def _pooled(self, states: torch.Tensor, inputs: Mapping[str, torch.Tensor], facts: _Facts) -> torch.Tensor:
        features: dict[str, Any] = {
            "token_embeddings": states[None],
            "cu_seq_lens_q": inputs["offsets"],
            **{name: inputs[name] for name in ("text", "pooled", "weights") if name in inputs},
        }
        if facts.prompt_tokens is not None:
            features["prompt_length"] = facts.prompt_tokens
        for module in self._rest:
            features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def widened(self) -> PackedGpuEngine:
        """The same in float32, made of the weights on the device; it is to be dropped soon."""
        other = copy.copy(self)
        other._attention = Bucketed()
        other._stack = self._stack.widened(other._attention)
        other._dtype = torch.float32
        other._words, other._places = self._words.float(), self._places.float()
        return other

    def positions(self, lengths: Rows) -> int:
        """The number of tokens that are computed for texts of these lengths, padding included."""
        return int(lengths.sum())

    def _encoded(self, inputs: Mapping[str, torch.Tensor], plan: AttentionPlan) -> torch.Tensor:
        """The last hidden state, tokens × hidden."""
        words = functional.embedding(inputs["ids"], self._words)
        places = functional.embedding(inputs["places"], self._places)
        x = self._norm(words.float() + places.float()).to(self._dtype)
        return self._stack.run(x, inputs, plan)


class _Stack:
    """All layers."""

    def __init__(self, weights: Weights, attention: Attention, device: torch.device, dtype: torch.dtype) -> None:
        self._layers = [_Layer(layer, weights, attention, device, dtype) for layer in weights.layers]

    def widened(self, attention: Attention) -> _Stack:
        other = copy.copy(self)
        other._layers = [layer.widened(attention) for layer in self._layers]
        return other

    def run(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], plan: AttentionPlan) -> torch.Tensor:
        """tokens × hidden, after the embeddings → the last hidden state."""
        for layer in self._layers:
            x = layer(x, inputs, plan)
        return x


class _Layer:
    def __init__(
        self, layer: Layer, weights: Weights, attention: Attention, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._attention = attention
        self._heads = weights.heads
        self._qkv = _Linear([layer.query, layer.key, layer.value], device, dtype)
        self._out = _Linear([layer.out], device, dtype)
        self._attention_norm = _Norm(layer.attention_norm, device, dtype)
        self._up = _Linear([layer.up], device, dtype)
        self._activation = weights.activation or functional.gelu
        self._down = _Linear([layer.down], device, dtype)
        self._norm = _Norm(layer.norm, device, dtype)

    def __call__(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], plan: AttentionPlan) -> torch.Tensor:
        tokens, hidden = x.shape
        qkv = self._qkv(x).view(tokens, 3, self._heads, hidden // self._heads)
        context = self._attention(qkv, inputs, plan).reshape(tokens, hidden)
        x = self._attention_norm(x + self._out(context))
        return self._norm(x + self._down(self._activation(self._up(x))))

    def widened(self, attention: Attention) -> _Layer:
        other = copy.copy(self)
        other._attention = attention
        for name, part in vars(self).items():
            if isinstance(part, _Linear | _Norm):
                setattr(other, name, _widened(part))
        return other


class _Linear:
    """Linear layers side by side, in one product."""

    def __init__(self, parts: list[Part], device: torch.device, dtype: torch.dtype) -> None:
        self.weight = torch.cat([torch.from_numpy(part.weight) for part in parts]).to(device, dtype)
        self.bias = torch.cat([torch.from_numpy(part.bias) for part in parts]).to(device, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class _Norm:
    """A LayerNorm; its statistics are computed in float32, whatever the type."""

    def __init__(self, part: Part, device: torch.device, dtype: torch.dtype) -> None:
        self.weight, self.bias = (torch.from_numpy(each).to(device, dtype) for each in (part.weight, part.bias))
        self._eps = part.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)


def _widened(part: _Linear | _Norm) -> _Linear | _Norm:
    other = copy.copy(part)
    other.weight, other.bias = part.weight.float(), part.bias.float()
    return other
