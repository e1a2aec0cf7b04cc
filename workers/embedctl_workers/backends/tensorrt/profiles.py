"""The shapes that a plan is built for, one profile per bucket of lengths; and how a batch is cut into these shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from embedctl_workers.arrays.tokens import Rows

#: The longest row of each bucket (tokens). Further edges double; the last one is the model's maximum.
_EDGES = (32, 64, 128, 256, 512)
#: Rows are padded to a multiple of this many tokens, which suits the matrix units.
_STEP = 8


@dataclass(frozen=True, slots=True)
class Profile:
    """The shapes that one part of a plan takes, each rows × tokens, from `(1, shortest)` to `(most, longest)`.

    `shortest` and `longest` are tokens of a row, padding included, `usual` and `most` rows.
    """

    shortest: int
    longest: int
    usual: int
    most: int

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """The smallest shape, the shape that the plan is optimised for, and the largest shape."""
        return (1, self.shortest), (self.usual, self.longest), (self.most, self.longest)

    def __str__(self) -> str:
        return " ".join(f"{rows}x{tokens}" for rows, tokens in self.shapes)


def profiles_for(max_tokens: int, batch_tokens: int) -> list[Profile]:
    """The profiles of a model, by length.

    A usual batch has `batch_tokens` tokens, padding included. One of short rows may be twice as large, because batches
    are cut by their longest row.
    """
    profiles: list[Profile] = []
    shortest = min(_STEP, max_tokens)
    for longest in _edges(max_tokens):
        usual = max(1, batch_tokens // longest)
        profiles.append(Profile(shortest, longest, usual, min(2 * usual, max(1, batch_tokens // shortest))))
        shortest = min(longest + _STEP, max_tokens)
    return profiles


def _edges(max_tokens: int) -> Iterator[int]:
    edge = _EDGES[0]
    for edge in _EDGES:
        if edge >= max_tokens:
            break
        yield edge
    while 2 * edge < max_tokens:
        edge *= 2
        yield edge
    yield max_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a batch for a profile (its number): `places` of its rows (int64), `width` in tokens with padding."""

    profile: int
    places: Rows
    width: int


def pieces_of(profiles: Sequence[Profile], lengths: Rows) -> list[Piece]:
    """Cut a batch of rows of these lengths (int64, tokens) into pieces whose shapes the plan takes."""
    of_profile = np.searchsorted([profile.longest for profile in profiles], lengths)
    pieces = []
    for number in np.unique(of_profile).tolist():
        profile, places = profiles[number], np.flatnonzero(of_profile == number)
        for at in range(0, len(places), profile.most):
            some = places[at : at + profile.most]
            longest = int(lengths[some].max())
            pieces.append(Piece(number, some, min(-(-longest // _STEP) * _STEP, profile.longest)))
    return pieces
