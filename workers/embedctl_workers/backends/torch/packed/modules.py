"""What turns the vectors of packed tokens into the vector of a text, as the modules of sentence-transformers do.

They take and give features by name, as those do: `token_embeddings` (1 × tokens × hidden), `cu_seq_lens_q` (int64, the
begin of each text and the end of the last one) and `sentence_embedding` (texts × dimensions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Features = dict[str, Any]


class Pooled(torch.nn.Module):
    """One vector of a text's tokens by each mode, side by side; the modes and formulas are those of `Pooling`."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self._ways = [_WAYS[mode] for mode in modes]

    def forward(self, features: Features) -> Features:
        tokens, offsets = features["token_embeddings"][0], features["cu_seq_lens_q"]
        return {**features, "sentence_embedding": torch.cat([way(tokens, offsets) for way in self._ways], dim=-1)}


def _sums(tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    texts = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    return torch.zeros(len(offsets) - 1, tokens.shape[1]).index_add(0, texts, tokens)


def _weighted_mean(tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The first token counts once, the second one twice, and so on."""
    begins = torch.repeat_interleave(offsets[:-1], offsets.diff())
    weights = (torch.arange(1, len(tokens) + 1) - begins).float().unsqueeze(1)
    return _sums(tokens * weights, offsets) / _sums(weights, offsets)


def _max(tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(tokens, "max", offsets=offsets)


def _length(offsets: torch.Tensor) -> torch.Tensor:
    return offsets.diff().float().unsqueeze(1)


_WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": lambda tokens, offsets: tokens[offsets[:-1]],
    "lasttoken": lambda tokens, offsets: tokens[offsets[1:] - 1],
    "mean": lambda tokens, offsets: _sums(tokens, offsets) / _length(offsets),
    "mean_sqrt_len_tokens": lambda tokens, offsets: _sums(tokens, offsets) / _length(offsets).sqrt(),
    "weightedmean": _weighted_mean,
    "max": _max,
}
#: The modes that :class:`Pooled` knows.
MODES = frozenset(_WAYS)


class Projected(torch.nn.Module):
    """A linear layer and an activation after it, as `Dense`."""

    def __init__(self, linear: torch.nn.Linear, activation: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, features: Features) -> Features:
        return {**features, "sentence_embedding": self.activation(self.linear(features["sentence_embedding"]))}


class Normalized(torch.nn.Module):
    """A vector of length 1, as `Normalize`."""

    def forward(self, features: Features) -> Features:
        vectors = torch.nn.functional.normalize(features["sentence_embedding"], p=2, dim=1)
        return {**features, "sentence_embedding": vectors}


class FirstDimensions(torch.nn.Module):
    """Keeps the first dimensions of a vector, where a model's configuration says so (`truncate_dim`).

    In sentence-transformers, `encode` does this after the last module.
    """

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, features: Features) -> Features:
        return {**features, "sentence_embedding": features["sentence_embedding"][:, : self.dimensions]}
