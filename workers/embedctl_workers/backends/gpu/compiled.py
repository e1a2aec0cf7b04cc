"""Batches filled up to one of a few sizes, so that layers are compiled for these sizes only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embedctl_workers.arrays.tokens import Rows

#: The sizes in tokens. At most eight: torch gives up compiling at a ninth.
BUCKETS = (1024, 2048, 4096, 8192, 16384, 32768)
#: A batch whose texts are shorter than this on average (tokens) runs as it is.
_TOKENS_A_TEXT = 8

#: Takes a function, and returns it compiled.
Compiler = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size to fill batches up to, in tokens."""

    tokens: int

    @property
    def texts(self) -> int:
        """Most texts of a batch; the filling counts as one more text."""
        return self.tokens // _TOKENS_A_TEXT

    def filled(self, values: Rows) -> Rows:
        """Values of the tokens, one per token, filled up with the first token's value."""
        return np.pad(values, (0, self.tokens - len(values)), constant_values=values[0])

    def ends(self, offsets: Rows) -> Rows:
        """The offsets of as many texts as a batch can have: the filling is one text, and missing texts are empty.

        The filling may be longer than any text, because its results are dropped.
        """
        return np.pad(offsets, (0, self.texts + 2 - len(offsets)), constant_values=self.tokens)


def bucket_of(tokens: int, texts: int) -> Bucket | None:
    """The smallest size that a batch fits into; None if it fits into none."""
    return next((bucket for bucket in map(Bucket, BUCKETS) if tokens <= bucket.tokens and texts <= bucket.texts), None)


def compiler() -> Compiler:
    """torch's compiler, for shapes that never change."""

    def compile_it(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        made: Any = torch.compile(function, dynamic=False)
        compiled: Callable[..., torch.Tensor] = made
        return compiled

    return compile_it
