"""The weights of encoders that can run on packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class Layer:
    """One encoder layer: attention, then feed-forward, each added to its input and normalised (post-norm)."""

    query: torch.nn.Linear
    key: torch.nn.Linear
    value: torch.nn.Linear
    out: torch.nn.Linear
    attention_norm: torch.nn.LayerNorm
    up: torch.nn.Linear
    down: torch.nn.Linear
    norm: torch.nn.LayerNorm


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a packed encoder."""

    words: torch.Tensor  #: float32, vocabulary × hidden
    #: float32, positions × hidden; includes the embedding of token type 0, the type of every token of a single text, if
    #: the model has token types
    places: torch.Tensor
    norm: torch.nn.LayerNorm  #: applied to the sum of both
    layers: list[Layer]
    heads: int
    #: the padding token's id for RoBERTa, which numbers positions from this id + 1 and skips padding tokens, even
    #: inside a text; None: positions are 0, 1, 2, …
    padding_id: int | None
    activation: Callable[[torch.Tensor], torch.Tensor] | None  #: of the feed-forward; None: exact GELU

    def free_layers(self) -> None:
        """Free the memory of the layers' weights; only their number stays."""
        for layer in self.layers:
            for part in fields(layer):
                for parameter in getattr(layer, part.name).parameters():
                    parameter.data = torch.empty(0)
