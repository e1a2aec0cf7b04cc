"""Texts for small models: of many lengths, with words that their tokenizers know and words that they do not."""

from __future__ import annotations

from typing import Any

import numpy as np

WORDS = (
    "the",
    "text",
    "That",
    "query",
    "of",
    "models",
    "WORD",
    "2024",
    "äöü",
    "日本語",
    "don't",
    "e.g.",
    "naïve",
    "reading",
)


def texts_of(seed: int = 0, longest: int = 60, count: int = 20) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest))) for _ in range(count)]


TEXTS = [*texts_of(), "a", "the", "The Words", "word " * 200, "🙂 unknown", "two\nlines\tand a tab", " the end "]


def text_of(count: int, tokenizer: Any) -> str:
    """A text of `count` tokens, including special tokens."""
    special = len(tokenizer("")["input_ids"])
    text = "a" + " the" * (count - special - 1)
    assert len(tokenizer(text, truncation=False)["input_ids"]) == count
    return text
