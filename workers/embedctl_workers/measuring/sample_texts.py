"""Texts to measure speed with, the same ones every time: the words of the gate's texts, drawn at random."""

from __future__ import annotations

import numpy as np

from embedctl_workers.backends.base import Backend
from embedctl_workers.models.gate_texts import TEXTS

#: Words of a text: median and spread of its logarithm, as in collections of passages (half of them below 20 words, one
#: in twenty above 90).
_MEDIAN_WORDS, _SPREAD = 20.0, 0.9
#: Enough words that no model has fewer tokens for them.
_MANY_WORDS = 450


def mixed_texts(rows: int) -> list[str]:
    """Texts of lengths as they are in collections of passages."""
    rng = np.random.default_rng(0)
    words = " ".join(TEXTS.values()).split()
    counts = np.exp(rng.normal(np.log(_MEDIAN_WORDS), _SPREAD, rows)).astype(int) + 1
    return [" ".join(rng.choice(words, count)) for count in counts]


def long_texts(rows: int, backend: Backend, most_tokens: int) -> list[str]:
    """Texts of about as many tokens as the model takes, or `most_tokens` if that is less."""
    rng = np.random.default_rng(0)
    words = TEXTS["over-long"].split()
    texts = [list(rng.choice(words, _MANY_WORDS)) for _ in range(rows)]
    whole = backend.tokenize([" ".join(text) for text in texts], None)
    wanted = min(backend.max_tokens, most_tokens)
    return [
        " ".join(text[: max(1, int(_MANY_WORDS * wanted / tokens))])
        for text, tokens in zip(texts, (whole.lengths + whole.lost).tolist(), strict=True)
    ]
