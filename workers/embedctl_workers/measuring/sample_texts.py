"""Texts to measure speed with: words of the gate's texts, drawn at random, and the same every time."""

from __future__ import annotations

import numpy as np

from embedctl_workers.backends.base import Backend
from embedctl_workers.models.gate_texts import TEXTS

#: Words per text: the median, and the standard deviation of the logarithm, as in collections of passages (half of them
#: below 20 words, one in twenty above 90).
_MEDIAN_WORDS, _SPREAD = 20.0, 0.9
#: Words of a long text before it is cut to length: every tokenizer makes at least one token of a word.
_WORDS_BEFORE_CUT = 450


def mixed_texts(rows: int) -> list[str]:
    """Texts whose lengths are distributed as in collections of passages."""
    rng = np.random.default_rng(0)
    words = " ".join(TEXTS.values()).split()
    counts = np.exp(rng.normal(np.log(_MEDIAN_WORDS), _SPREAD, rows)).astype(int) + 1
    return [" ".join(rng.choice(words, count)) for count in counts]


def long_texts(rows: int, backend: Backend, most_tokens: int) -> list[str]:
    """Texts of about the model's largest number of tokens, or of `most_tokens` if that is less."""
    rng = np.random.default_rng(0)
    words = TEXTS["over-long"].split()
    texts = [list(rng.choice(words, _WORDS_BEFORE_CUT)) for _ in range(rows)]
    whole = backend.tokenize([" ".join(text) for text in texts], None)
    wanted = min(backend.max_tokens, most_tokens)
    return [
        " ".join(text[: max(1, int(_WORDS_BEFORE_CUT * wanted / tokens))])
        for text, tokens in zip(texts, (whole.lengths + whole.lost).tolist(), strict=True)
    ]
