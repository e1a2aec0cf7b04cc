"""Pads rows to a common width, for models that require it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from embedctl_workers.arrays.tokens import Rows, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Padding:
    """Pads the inputs of some of the texts as a model's tokenizer does, and makes their attention mask.

    Args:
        fillers: the value that pads each input.
        left: whether padding comes before the text.
    """

    def __init__(self, fillers: Mapping[str, int], *, left: bool) -> None:
        self._fillers = fillers
        self._left = left

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self:
        fillers = {
            "input_ids": tokenizer.pad_token_id or 0,
            "token_type_ids": tokenizer.pad_token_type_id,
            "attention_mask": 0,
        }
        return cls(fillers, left=tokenizer.padding_side == "left")

    def __call__(self, tokens: Tokens, rows: Rows, width: int) -> dict[str, np.ndarray[Any, Any]]:
        """The inputs by name, int64, rows × width.

        Args:
            width: at least that of the longest row.
        """
        columns = {name: [column[row] for row in rows] for name, column in tokens.columns.items()}
        columns["attention_mask"] = [[1] * length for length in tokens.lengths[rows].tolist()]
        return {name: self._pad(column, width, self._fillers[name]) for name, column in columns.items()}

    def _pad(self, column: Sequence[Sequence[int]], width: int, filler: int) -> np.ndarray[Any, Any]:
        padded = np.full((len(column), width), filler, np.int64)
        for target, ids in zip(padded, column, strict=True):
            target[width - len(ids) if self._left else 0 : width if self._left else len(ids)] = ids
        return padded
