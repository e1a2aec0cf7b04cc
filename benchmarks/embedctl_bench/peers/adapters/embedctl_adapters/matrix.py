"""The device's matrix products alone, as `embedctl model verify` measures them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.measuring.flops import shape_of
from embedctl_workers.measuring.matrix_products import matrix_products

from .serving import Timed

_SECONDS = 1.0


class MatrixAdapter:
    """Its seconds are computed: those of the texts' operations at the device's matrix rate. It makes no vectors."""

    def __init__(self, model: Path, threads: int, hardware: str) -> None:
        products, shape = matrix_products(SHIPPED_CLASSES[hardware], threads), shape_of(model)
        if isinstance(products, str) or shape is None:
            raise RuntimeError(f"no matrix rate: {products if shape else 'the model is of an unknown shape'}")
        self._products, self._shape = products, shape
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._counted: tuple[Sequence[str], Rows] = ((), np.zeros(0, np.int64))

    def encode(self, texts: Sequence[str]) -> Timed:
        """Multiply for a second; every token of the texts counts."""
        lengths = self._lengths(texts)
        seconds = self._shape.flop(lengths) / self._products.rate(_SECONDS)
        return Timed(np.empty((len(texts), 0), np.float32), seconds, int(lengths.sum()))

    def _lengths(self, texts: Sequence[str]) -> Rows:
        """Tokens of each text, counted once."""
        if list(self._counted[0]) != list(texts):
            self._counted = texts, np.array([len(each.ids) for each in self._tokenizer.encode_batch(list(texts))])
        return self._counted[1]
