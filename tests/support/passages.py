"""Passages of real text, as in a corpus."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

import numpy as np

CORPUS = Path(__file__).parents[2] / "demo" / "corpus.py"


def passages(count: int) -> list[str]:
    """The first paragraphs of docstrings."""
    spec = importlib.util.spec_from_file_location("demo_corpus", CORPUS)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [text for _, text in islice(module.passages(), count)]


def real_passages(count: int) -> list[str]:
    """Paragraphs of docstrings. Some have a single word, and some exceed the model's 256 tokens."""
    texts = passages(count)
    long = [" ".join(texts[at : at + 14]) for at in range(0, 1400, 70)]
    short = sorted({word for text in texts[:40] for word in text.split()})[:20]
    mixed = texts + long + short
    return [mixed[at] for at in np.random.default_rng(0).permutation(len(mixed))]
