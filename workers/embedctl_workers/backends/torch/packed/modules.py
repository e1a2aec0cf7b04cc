"""What turns the vectors of packed tokens into the vector of a text, as the modules of sentence-transformers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from embedctl_workers.arrays.outputs import TokenVectors, scored_in, token_vectors
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.backends.torch.packed.weights import Floats

#: Takes vectors, and where each text begins among tokens, then the end of the last one. What pools takes the vectors of
#: tokens, tokens × hidden; what follows takes those of texts.
Step = Callable[[Vectors, Rows], Vectors]
#: All steps: it also takes how many of each text's first tokens are a prompt that pooling leaves out.
Rest = Callable[[Vectors, Rows, int | None], Vectors]


def in_turn(steps: Sequence[Step]) -> Rest:
    """The steps one after the other; none of them leaves out a prompt."""

    def rest(vectors: Vectors, offsets: Rows, _prompt_tokens: int | None) -> Vectors:
        for step in steps:
            vectors = step(vectors, offsets)
        return vectors

    return rest


def of_tokens(steps: Rest) -> Callable[[Vectors, Tokens, Rows], TokenVectors]:
    """The head of multi-vectors: the steps on the states of the tokens that are scored."""

    def head(states: Vectors, tokens: Tokens, rows: Rows) -> TokenVectors:
        scored = scored_in(tokens, rows)
        return token_vectors(steps(states[scored], rows, None), scored, tokens.lengths[rows])

    return head


def pooled(modes: Sequence[str]) -> Step:
    """One vector of a text's tokens by each mode, side by side; the modes and formulas are those of `Pooling`."""
    ways = [_WAYS[mode] for mode in modes]
    return lambda tokens, offsets: np.concatenate([way(tokens, offsets) for way in ways], axis=1)


def projected(weight: Floats, bias: Floats | None, activation: Callable[[Vectors], Vectors]) -> Step:
    """A linear layer and an activation after it, as `Dense`."""
    return lambda vectors, _: activation(vectors @ weight.T + (0 if bias is None else bias))


def normalized(vectors: Vectors, _: Rows) -> Vectors:
    """A vector of length 1, as `Normalize`."""
    return unit(vectors)


def first_dimensions(dimensions: int) -> Step:
    """Keeps the first dimensions of a vector."""
    return lambda vectors, _: vectors[:, :dimensions]


def _sums(tokens: Vectors, offsets: Rows) -> Vectors:
    # One by one: NumPy's reduceat takes ten times as long.
    return np.array([tokens[begin:end].sum(axis=0) for begin, end in pairwise(offsets.tolist())])


def _max(tokens: Vectors, offsets: Rows) -> Vectors:
    return np.array([tokens[begin:end].max(axis=0) for begin, end in pairwise(offsets.tolist())])


def _weighted_mean(tokens: Vectors, offsets: Rows) -> Vectors:
    """The first token counts once, the second one twice, and so on."""
    begins = np.repeat(offsets[:-1], np.diff(offsets))
    weights = (np.arange(1, len(tokens) + 1) - begins).astype(np.float32)[:, np.newaxis]
    mean: Vectors = _sums(tokens * weights, offsets) / _sums(weights, offsets)
    return mean


def _length(offsets: Rows) -> Vectors:
    return np.diff(offsets).astype(np.float32)[:, np.newaxis]


_WAYS: dict[str, Callable[[Vectors, Rows], Vectors]] = {
    "cls": lambda tokens, offsets: tokens[offsets[:-1]],
    "lasttoken": lambda tokens, offsets: tokens[offsets[1:] - 1],
    "mean": lambda tokens, offsets: _sums(tokens, offsets) / _length(offsets),
    "mean_sqrt_len_tokens": lambda tokens, offsets: _sums(tokens, offsets) / _length(offsets) ** np.float32(0.5),
    "weightedmean": _weighted_mean,
    "max": _max,
}
#: The modes that :func:`pooled` knows.
MODES = frozenset(_WAYS)
