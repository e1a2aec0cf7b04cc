"""What the packed engines compute on: a batch's texts side by side, and the tables that embed their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.torch.packed.weights import Floats, Part


@dataclass(frozen=True, slots=True)
class Packed:
    """Texts side by side."""

    ids: Rows  #: int64, one per token
    positions: Rows  #: int64, one per token: its row in the table of position embeddings
    offsets: Rows  #: int64, one more than texts: the begin of each text, then the end of the last one


@dataclass(frozen=True, slots=True)
class Texts:
    """Where the texts of a batch lie in its matrices."""

    offsets: Rows  #: int64, one more than texts: the first row of each text, then the end of the last one
    #: int64: the texts, longest first. Threads take them in this order, so that none begins the longest last.
    order: Rows
    longest: int  #: tokens of the longest text
    #: int64: how many of a text's first tokens all of them attend to; None: all. Only torch's kernels know of it.
    attended: Rows | None = None

    @classmethod
    def at(cls, offsets: Rows) -> Self:
        """The texts that begin at these rows; `offsets` as the attribute."""
        lengths = np.diff(offsets)
        order = np.argsort(-lengths, kind="stable")
        return cls(offsets, order, int(lengths.max()))

    def parted(self, tokens: int) -> tuple[Self | None, Self | None]:
        """The texts of so many tokens or more, and those of fewer; None where there are none."""
        lengths = np.diff(self.offsets)[self.order]
        long = int((lengths >= tokens).sum())
        parts = [(self.order[:long], lengths[:long]), (self.order[long:], lengths[long:])]
        first, second = (replace(self, order=order, longest=int(of[0])) if len(order) else None for order, of in parts)
        return first, second


@dataclass(frozen=True, slots=True)
class Tables:
    """What tokens are embedded with: LayerNorm(words[id] + places[position]); float32, contiguous, a row for each."""

    words: Floats
    places: Floats
    norm: Part


def packed_texts(tokens: Tokens, rows: Rows, sizes: tuple[int, int], padding_id: int | None) -> Packed:
    """Pack some of the texts side by side; IndexError if the model has no embedding for a token or a position.

    `sizes` are those of the tables of tokens and of positions; `padding_id` as :class:`.weights.Weights`.
    """
    chosen = tokens.columns["input_ids"].select(rows)
    ids, offsets = chosen.values.astype(np.int64), chosen.offsets
    positions = positions_of(ids, offsets, padding_id)
    check_within(ids, sizes[0])
    check_within(positions, sizes[1])
    return Packed(ids, positions, offsets)


def check_within(indices: Rows, size: int) -> None:
    """Refuse (IndexError) indices outside a table of embeddings, before a device reads there."""
    if not 0 <= indices.min() <= indices.max() < size:
        raise IndexError(f"an index of {indices.max()} into a table of {size} embeddings")


def positions_of(ids: Rows, offsets: Rows, padding_id: int | None) -> Rows:
    """The position of each token, as the model counts: see :class:`.weights.Weights`."""
    lengths = np.diff(offsets)
    if padding_id is None:
        return np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    real = ids != padding_id
    before = np.concatenate([[0], np.cumsum(real)])
    positions: Rows = (before[1:] - np.repeat(before[offsets[:-1]], lengths)) * real + padding_id
    return positions
