"""Tokenises texts without padding, by the model's own tokenizer without its wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import numpy as np
from tokenizers import Encoding, Tokenizer

from embedctl_workers.arrays.tokens import Ragged, Rows, Side, Tokens, Windows, in_order_of_windows

#: Input of a model → attribute of an encoding.
_COLUMNS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


@dataclass(frozen=True, slots=True)
class Cut:
    """Texts tokenised and cut at a maximum length.

    `ids`, int32, are the tokens that were kept of each text, special ones included; `lost`, int64, counts those cut
    off. It is -1 for a text that was left out, whose ids are empty.
    """

    ids: Ragged
    lost: Rows


class FastTokenizer(Protocol):
    """Tokenises most texts as a certain tokenizer does, faster, all of token type 0."""

    def __call__(self, texts: Sequence[str], most: int, *, keep_end: bool) -> Cut:
        """Tokenise texts, perhaps not all; UnicodeEncodeError if one holds half of a surrogate pair.

        At most `most` tokens are kept of a text, special ones included: its begin, or its end if `keep_end`.
        """


class TextTokenizer:
    """A tokenizer that cuts at a model's maximum length and counts what it cuts off; it never pads.

    Args:
        tokenizer: is copied; its own truncation and padding do not apply.
        max_tokens: most tokens of a text, special ones included.
        columns: the inputs that the model takes, among `input_ids`, `attention_mask` and `token_type_ids`.
        keep: which end of a text that is too long is kept. Windows are cut from that end, so the window at the other
            end may be short.
        fast: tokenises as `tokenizer`; None if there is no such thing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        columns: Sequence[str],
        keep: Side = "left",
        fast: FastTokenizer | None = None,
    ) -> None:
        self._tokenizer = _cutting(tokenizer, max_tokens, keep)
        self._keep = keep
        self._max_tokens = max_tokens
        self._fast = fast
        self._turned: TextTokenizer | None = None
        self._columns = {name: _COLUMNS[name] for name in columns}

    def only(self, *columns: str) -> Self:
        """The same, for a model that takes these inputs alone."""
        other = copy(self)
        other._columns = {name: self._columns[name] for name in columns}
        other._turned = None
        return other

    def __call__(self, texts: Sequence[str], truncation_side: Side | None = None) -> Tokens:
        """Tokenise texts; `prompt_tokens` stays None.

        A text that is too long loses its end on `truncation_side`; None: not the one that is kept by default.
        """
        if truncation_side == self._keep:
            return self._turn()(texts)
        if self._fast is None:
            return self._by_library(texts)
        try:
            cut = self._fast(texts, self._max_tokens, keep_end=self._keep == "right")
        except UnicodeEncodeError:
            return self._by_library(texts)  # which says what is wrong
        left_out = np.flatnonzero(cut.lost < 0).tolist()
        tokens = self._of_cut(cut)
        if left_out:
            tokens = _filled(tokens, left_out, self._by_library([texts[at] for at in left_out]))
        return replace(tokens, windows=partial(self._windows_of, texts) if tokens.lost.any() else None)

    def _turn(self) -> TextTokenizer:
        """The same, which keeps the other end."""
        if self._turned is None:
            other = copy(self)
            other._keep = "left" if self._keep == "right" else "right"
            other._tokenizer = _cutting(self._tokenizer, self._max_tokens, other._keep)
            self._turned = other
        return self._turned

    def _by_library(self, texts: Sequence[str]) -> Tokens:
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        lost = np.array([sum(map(_content, encoding.overflowing)) for encoding in encodings], np.int64)
        return replace(
            self._tokens(encodings), lost=lost, windows=partial(self._windows, encodings) if lost.any() else None
        )

    def _of_cut(self, cut: Cut) -> Tokens:
        constant = {"attention_mask": 1, "token_type_ids": 0}
        columns = {
            name: Ragged(np.full_like(cut.ids.values, constant[name]), cut.ids.offsets) if name in constant else cut.ids
            for name in self._columns
        }
        return Tokens(np.diff(cut.ids.offsets), cut.lost, columns)

    def _tokens(self, encodings: Sequence[Encoding]) -> Tokens:
        return Tokens(
            lengths=np.array([len(encoding) for encoding in encodings], np.int64),
            lost=np.zeros(len(encodings), np.int64),
            columns={
                name: Ragged.of([getattr(encoding, source) for encoding in encodings])
                for name, source in self._columns.items()
            },
        )

    def _windows_of(self, texts: Sequence[str]) -> Windows:
        return self._windows(self._tokenizer.encode_batch_fast(list(texts)))

    def _windows(self, encodings: Sequence[Encoding]) -> Windows:
        order = 1 if self._keep == "left" else -1
        parts, text = in_order_of_windows([[each, *each.overflowing][::order] for each in encodings])
        return Windows(self._tokens(parts), text, np.array([_content(part) for part in parts], np.int64))


def _cutting(tokenizer: Tokenizer, max_tokens: int, keep: Side) -> Tokenizer:
    """A copy that keeps this end of a text that is too long, and does not pad."""
    other = Tokenizer.from_str(tokenizer.to_str())
    other.no_padding()
    other.enable_truncation(max_tokens, direction="right" if keep == "left" else "left")
    return other


def _filled(tokens: Tokens, left_out: Sequence[int], others: Tokens) -> Tokens:
    """The same, with texts that were left out in their places."""
    row = np.arange(len(tokens.lengths))
    row[left_out] = len(row) + np.arange(len(left_out))
    return Tokens(
        lengths=np.concatenate([tokens.lengths, others.lengths])[row],
        lost=np.concatenate([tokens.lost, others.lost])[row],
        columns={
            name: Ragged.joined([column, others.columns[name]]).select(row) for name, column in tokens.columns.items()
        },
    )


def _content(part: Encoding) -> int:
    """How many tokens of a window are not special."""
    return len(part.ids) - sum(part.special_tokens_mask)
