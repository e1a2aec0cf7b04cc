"""Tokenises texts without padding, by the model's own tokenizer without its wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Literal, Self

import numpy as np
from tokenizers import Encoding, Tokenizer

from embedctl_workers.arrays.tokens import Ragged, Tokens, Windows, in_order_of_windows

#: Input of a model → attribute of an encoding.
_COLUMNS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class TextTokenizer:
    """A tokenizer that cuts at a model's maximum length and counts what it cuts off; it never pads.

    Args:
        tokenizer: is copied; its own truncation and padding do not apply.
        max_tokens: most tokens of a text, special ones included.
        columns: the inputs that the model takes, among `input_ids`, `attention_mask` and `token_type_ids`.
        keep: which end of a text that is too long is kept. Windows are cut from that end, so the window at the other
            end may be short.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        columns: Sequence[str],
        keep: Literal["left", "right"] = "left",
    ) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens, direction="right" if keep == "left" else "left")
        self._keep = keep
        self._columns = {name: _COLUMNS[name] for name in columns}

    def only(self, *columns: str) -> Self:
        """The same, for a model that takes these inputs alone."""
        other = copy(self)
        other._columns = {name: self._columns[name] for name in columns}
        return other

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokenise texts; `prompt_tokens` stays None."""
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        lost = np.array([sum(map(_content, encoding.overflowing)) for encoding in encodings], np.int64)
        return replace(
            self._tokens(encodings), lost=lost, windows=partial(self._windows, encodings) if lost.any() else None
        )

    def _tokens(self, encodings: Sequence[Encoding]) -> Tokens:
        return Tokens(
            lengths=np.array([len(encoding) for encoding in encodings], np.int64),
            lost=np.zeros(len(encodings), np.int64),
            columns={
                name: Ragged.of([getattr(encoding, source) for encoding in encodings])
                for name, source in self._columns.items()
            },
        )

    def _windows(self, encodings: Sequence[Encoding]) -> Windows:
        order = 1 if self._keep == "left" else -1
        parts, text = in_order_of_windows([[each, *each.overflowing][::order] for each in encodings])
        return Windows(self._tokens(parts), text, np.array([_content(part) for part in parts], np.int64))


def _content(part: Encoding) -> int:
    """How many tokens of a window are not special."""
    return len(part.ids) - sum(part.special_tokens_mask)
