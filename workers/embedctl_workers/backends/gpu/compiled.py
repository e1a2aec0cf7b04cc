"""Batches filled up to one of a few sizes, so that layers are compiled for those and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embedctl_workers.arrays.tokens import Rows

#: Tokens of the sizes. No more than eight: for one more torch would give up compiling.
BUCKETS = (1024, 2048, 4096, 8192, 16384, 32768)
#: A batch of shorter texts than this on average runs as it is.
_TOKENS_A_TEXT = 8

#: Makes a function that does the same, compiled.
Compiler = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size to fill batches up to, in tokens."""

    tokens: int

    @property
    def texts(self) -> int:
        """Most texts of a batch; the filling is one more."""
        return self.tokens // _TOKENS_A_TEXT

    def filled(self, values: Rows) -> Rows:
        """One value a token, with those of the first token behind them."""
        return np.pad(values, (0, self.tokens - len(values)), constant_values=values[0])

    def ends(self, offsets: Rows) -> Rows:
        """Where each text begins, for as many as can be: the filling is one text, and those that are missing are empty.

        What is computed for the filling is dropped: it may be longer than any text.
        """
        return np.pad(offsets, (0, self.texts + 2 - len(offsets)), constant_values=self.tokens)


def bucket_of(tokens: int, texts: int) -> Bucket | None:
    """The smallest size that a batch fits into; None where it fits into none."""
    return next((bucket for bucket in map(Bucket, BUCKETS) if tokens <= bucket.tokens and texts <= bucket.texts), None)


def compiler() -> Compiler:
    """torch's own, for shapes that never change."""

    def compile_it(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        made: Any = torch.compile(function, dynamic=False)
        compiled: Callable[..., torch.Tensor] = made
        return compiled

    return compile_it
