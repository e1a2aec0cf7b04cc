"""The weights of encoders that can run on packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer (weight: out × in) or a LayerNorm (weight: one number for each input); float32, contiguous."""

    weight: Floats
    bias: Floats
    eps: float = 0.0  #: of a LayerNorm


@dataclass(frozen=True, slots=True)
class Layer:
    """One encoder layer: attention, then feed-forward, each added to its input and normalised (post-norm)."""

    query: Part
    key: Part
    value: Part
    out: Part
    attention_norm: Part
    up: Part
    down: Part
    norm: Part


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a packed encoder."""

    words: Floats  #: vocabulary × hidden
    #: positions × hidden; includes the embedding of token type 0, the type of every token of a single text, if there
    #: are types
    places: Floats
    norm: Part  #: applied to the sum of both
    layers: list[Layer]
    heads: int
    #: the padding token's id for RoBERTa, which numbers positions from this id + 1 and skips padding tokens, even
    #: inside a text; None: positions are 0, 1, 2, …
    padding_id: int | None
    activation: Callable[[Any], Any] | None  #: of the feed-forward, on tensors; None: exact GELU
