"""Shared by the packed engines: the packing of a batch's texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.torch.packed.weights import Weights


@dataclass(frozen=True, slots=True)
class Packed:
    """Texts side by side."""

    ids: Rows  #: int64, one per token
    positions: Rows  #: int64, one per token: its row in the table of position embeddings
    offsets: Rows  #: int64, one more than texts: the begin of each text, then the end of the last one


def packed_texts(tokens: Tokens, rows: Rows, weights: Weights) -> Packed:
    """Pack some of the texts side by side; IndexError if the model has no embedding for a token or a position."""
    chosen = tokens.columns["input_ids"].select(rows)
    ids, offsets = chosen.values.astype(np.int64), chosen.offsets
    positions = positions_of(ids, offsets, weights.padding_id)
    check_within(ids, len(weights.words))
    check_within(positions, len(weights.places))
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
