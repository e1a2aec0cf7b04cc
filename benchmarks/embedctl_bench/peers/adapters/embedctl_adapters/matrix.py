"""The device's matrix products alone, as `embedctl model verify` measures them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_workers.measuring.flops import shape_of
from embedctl_workers.measuring.matrix_products import matrix_products

from .serving import Timed
from .tokens import TokenCounter

_SECONDS = 1.0


class MatrixAdapter:
    """Its seconds are computed: those of the texts' operations at the device's matrix rate. It makes no vectors."""

    def __init__(self, model: Path, threads: int, hardware: str) -> None:
        products, shape = matrix_products(SHIPPED_CLASSES[hardware], threads), shape_of(model)
        if isinstance(products, str) or shape is None:
            raise RuntimeError(f"no matrix rate: {products if shape else 'the model is of an unknown shape'}")
        self._products, self._shape = products, shape
        self._counter = TokenCounter(model)

    def encode(self, texts: Sequence[str]) -> Timed:
        """Multiply for a second; every token of the texts counts."""
        lengths = np.array(self._counter.lengths(texts))
        seconds = self._shape.flop(lengths) / self._products.rate(_SECONDS)
        return Timed(np.empty((len(texts), 0), np.float32), seconds, int(lengths.sum()))
