"""Tokenised texts, and the arrays that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from embedctl_config.outputs import PLAIN, Output

#: int64.
Rows = npt.NDArray[np.int64]
#: float32, texts × dimensions.
Vectors = npt.NDArray[np.float32]
#: object, texts × outputs; see :mod:`.outputs`.
Cells = npt.NDArray[np.object_]
#: What a model gives of texts: Vectors, or Cells if other outputs are asked for.
Found = npt.NDArray[Any]

#: An end of a text.
Side = Literal["left", "right"]

#: The column that says which tokens have a vector in a text's multi-vector: 1 or 0.
SCORED = "scored"

T = TypeVar("T")


class Query(str):
    """The prompt of a query, for a model that prepares queries otherwise than documents."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of integers (int32 or int64) of different lengths, one after the other in one array.

    `offsets`, int64, one more than rows, tell where each row begins, then the end of the last one.
    """

    values: np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
    offsets: Rows

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], dtype: type[np.signedinteger[Any]] = np.int32) -> Self:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(rows), dtype, count=int(offsets[-1])), offsets)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The rows of all parts, which have one dtype."""
        parts = list(parts)
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray[Any, np.dtype[np.signedinteger[Any]]]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def select(self, rows: Rows) -> Ragged:
        """Some of the rows, in this order; perhaps views of these."""
        if len(rows) == len(self) and (rows == np.arange(len(rows))).all():
            return self
        begins = self.offsets[rows]
        lengths = self.offsets[rows + 1] - begins
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
        return Ragged(self.values[at], offsets)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokenised texts, unpadded."""

    lengths: Rows  #: int64, for each text: tokens that will be encoded, special ones included
    lost: Rows  #: int64, for each text: tokens cut off at the model's maximum length
    columns: Mapping[str, Ragged] = field(default_factory=dict)  #: the model's inputs by name; a row for each text
    #: how many of each text's first tokens are the prompt, if pooling leaves the prompt out
    prompt_tokens: int | None = None
    #: makes windows of the uncut texts; None if no text is longer than the model takes
    windows: Callable[[], Windows] | None = None
    outputs: tuple[Output, ...] = PLAIN  #: what is to be made of the texts

    def select(self, rows: Rows) -> Tokens:
        """Some of the texts, in this order, without their windows."""
        columns = {name: column.select(rows) for name, column in self.columns.items()}
        return Tokens(self.lengths[rows], self.lost[rows], columns, self.prompt_tokens, outputs=self.outputs)

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """The texts of all parts, which have the same columns, prompt and outputs, without their windows."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            lengths=np.concatenate([part.lengths for part in parts]),
            lost=np.concatenate([part.lost for part in parts]),
            columns={name: Ragged.joined([part.columns[name] for part in parts]) for name in parts[0].columns},
            prompt_tokens=parts[0].prompt_tokens,
            outputs=parts[0].outputs,
        )


@dataclass(frozen=True, slots=True)
class Windows:
    """Texts cut into consecutive windows of at most the model's maximum length, each with its special tokens."""

    tokens: Tokens  #: a row for each window: the first window of each text, in the order of the texts; then all others
    text: Rows  #: int64, for each window: the text that it is a part of
    content: Rows  #: int64, for each window: its tokens without the special ones


def in_order_of_windows(parts: Sequence[Sequence[T]]) -> tuple[list[T], Rows]:
    """The parts of texts, one or more each, in the order of :class:`Windows`, and the text of each part, int64."""
    more = [len(each) - 1 for each in parts]
    rows = [each[0] for each in parts] + [part for each in parts for part in each[1:]]
    texts = np.arange(len(parts))
    return rows, np.concatenate([texts, np.repeat(texts, more)])


def padded(lengths: Rows) -> int:
    """How many tokens a batch has, padding included, if each row is padded to the longest."""
    return len(lengths) * int(lengths.max(initial=0))
