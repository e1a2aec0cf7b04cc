"""Passages of real text, as in a corpus."""

from __future__ import annotations

from itertools import islice

import numpy as np

from embedctl_bench.texts import passages as found


def passages(count: int) -> list[str]:
    """The first paragraphs of docstrings."""
    return [text for _, text in islice(found.passages(), count)]


def real_passages(count: int) -> list[str]:
    """Paragraphs of docstrings. Some have a single word, and some exceed the model's 256 tokens."""
    texts = passages(count)
    long = [" ".join(texts[at : at + 14]) for at in range(0, 1400, 70)]
    short = sorted({word for text in texts[:40] for word in text.split()})[:20]
    mixed = texts + long + short
    return [mixed[at] for at in np.random.default_rng(0).permutation(len(mixed))]
