"""Tokens of texts by a model's fast tokenizer, for systems that do not count them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


class TokenCounter:
    """Counts without truncation and padding; the same texts are counted once."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._known: dict[tuple[str, ...], list[int]] = {}

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, special tokens included."""
        key = tuple(texts)
        if key not in self._known:
            self._known[key] = [len(each.ids) for each in self._tokenizer.encode_batch(list(texts))]
        return self._known[key]
