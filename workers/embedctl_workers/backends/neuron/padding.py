"""The check, before a trace is used, that neither padding nor the other rows of a run change a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from embedctl_config.errors import ModelError
from embedctl_config.hardware import THRESHOLDS
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.arrays.vectors import unit

_SHORT, _WORD = "a", "word "
#: The number of tokens of a word is unknown: the number of words is halved this often, so that a text fits a row.
_HALVINGS = 6


def check_padding(
    model: str,
    buckets: Sequence[int],
    batch: int,
    tokenize: Callable[[Sequence[str], str | None], Tokens],
    run: Callable[[Tokens, Rows, int], Vectors],
) -> None:
    """Encode a short text in every bucket, alone and beside texts that fill their rows.

    `run` computes vectors of some of the texts, at most `batch`, in a bucket. If the short text's vector differs
    between runs by more than the bound of `fp16`, that is a ModelError.
    """
    bound = THRESHOLDS["fp16"].min_cosine
    expected: Vectors | None = None
    for bucket in buckets:
        tokens = tokenize([_SHORT, *(_WORD * (bucket >> halved) for halved in range(_HALVINGS))], "")
        fitting = np.flatnonzero(tokens.lengths <= bucket)
        if 0 not in fitting:
            continue
        crowded = np.full(batch, fitting[np.argmax(tokens.lengths[fitting])])
        crowded[0] = 0
        for rows in (np.zeros(1, np.int64), crowded):
            found = unit(run(tokens, rows, bucket)[:1])
            expected = found if expected is None else expected
            cosine = float((found * expected).sum())
            if not cosine >= bound:
                raise ModelError(
                    f"model {model!r}: padding shows in its vectors on Neuron (cosine {cosine:.4f} in a run of "
                    f"{batch} × {bucket} tokens): its trace does not mask it"
                )
