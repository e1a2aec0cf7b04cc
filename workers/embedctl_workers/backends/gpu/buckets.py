"""The few sizes that batches are filled up to, for layers that are compiled or captured for each size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from embedctl_workers.arrays.tokens import Rows

#: The sizes in tokens. At most eight: torch gives up compiling at a ninth. Finer steps would save little: only the last
#: batch of its kind is filled up much, because the others are cut at the token budget, which is one of the sizes.
BUCKETS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: A batch whose texts are shorter than this on average (tokens) runs as it is.
_TOKENS_A_TEXT = 8
#: The fewest texts of a size. Larger counts double, so that fewer than half of the texts are empty.
_FEWEST_TEXTS = 32
#: The tokens of a longest text; beyond these, the model's maximum. Attention begins a block for each 128 tokens that a
#: text might have, so one bound for all would begin mostly empty ones.
_LONGEST = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size to fill batches up to; `tokens` and `texts` count those of the filling, and `texts` empty ones too.

    No text has more tokens than `longest`, nor has the filling.
    """

    tokens: int
    texts: int
    longest: int

    @classmethod
    def of(cls, lengths: Rows, most: int) -> Self | None:
        """The smallest size for texts of these lengths, of at most `most` tokens in this model; None if none fits."""
        tokens = tokens_of_bucket(lengths)
        if tokens is None:
            return None
        longest = next((step for step in _LONGEST if lengths.max() <= step <= most), most)
        filling = -(-(tokens - int(lengths.sum())) // longest)
        texts = max(_FEWEST_TEXTS, 1 << (len(lengths) + filling - 1).bit_length())
        return cls(tokens, texts, longest)

    def filled(self, values: Rows) -> Rows:
        """Values of the tokens, one per token, filled up with the first token's value."""
        return np.pad(values, (0, self.tokens - len(values)), constant_values=values[0])

    def ends(self, offsets: Rows) -> Rows:
        """The offsets of all texts: the batch's, those of the filling, and empty ones at the end."""
        filling = np.arange(offsets[-1] + self.longest, self.tokens, self.longest)
        ends = np.concatenate([offsets, filling])
        return np.pad(ends, (0, self.texts + 1 - len(ends)), constant_values=self.tokens)


def tokens_of_bucket(lengths: Rows) -> int | None:
    """The tokens that a batch of texts of these lengths is filled up to; None if it runs as it is."""
    count = int(lengths.sum())
    return next((size for size in BUCKETS if count <= size and len(lengths) <= size // _TOKENS_A_TEXT), None)


def largest_bucket(tokens: int) -> int:
    """The largest size of at most so many tokens; 0 if there is none."""
    return max((size for size in BUCKETS if size <= tokens), default=0)
