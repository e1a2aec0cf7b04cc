"""Pads rows to a common width, for models that require it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from embedctl_workers.arrays.tokens import SCORED, Rows, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def used_places(tokens: Tokens, rows: Rows, width: int) -> npt.NDArray[np.bool_]:
    """Where some of the texts have tokens if padded to a width, rows × width."""
    return np.arange(width) < tokens.lengths[rows, np.newaxis]


class Padding:
    """Pads the inputs of some of the texts, each with its filler, and makes their attention mask.

    Padding is at the end, whatever the tokenizer's side, so that a token keeps its position in the text alone.
    """

    def __init__(self, fillers: Mapping[str, int]) -> None:
        self._fillers = fillers

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self:
        fillers = {
            "input_ids": tokenizer.pad_token_id or 0,
            "token_type_ids": tokenizer.pad_token_type_id,
            "attention_mask": 0,
            SCORED: 0,
        }
        return cls(fillers)

    def __call__(self, tokens: Tokens, rows: Rows, width: int) -> dict[str, np.ndarray[Any, Any]]:
        """The inputs by name, int64, rows × width, which is at least that of the longest row."""
        used = used_places(tokens, rows, width)
        inputs = {"attention_mask": used.astype(np.int64)}
        for name, column in tokens.columns.items():
            inputs[name] = np.full(used.shape, self._fillers[name], np.int64)
            inputs[name][used] = column.select(rows).values
        return inputs
