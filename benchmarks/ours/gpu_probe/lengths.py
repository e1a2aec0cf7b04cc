"""Lengths of texts, as in embedctl_bench.engines.workloads: W1 is log-normal, W2 always the same."""

from __future__ import annotations

import numpy as np

from embedctl_workers.arrays.tokens import Rows

WORKLOADS = ("W1", "W2")
_MEDIAN, _SIGMA, _SHORTEST, _LONGEST = 26, 0.914, 8, 256
_LONG = 449


def lengths_of(workload: str, tokens: int, seed: int = 0) -> Rows:
    """Lengths of texts that have this many tokens together, int64."""
    rng = np.random.default_rng(seed)
    if workload == "W1":
        drawn = np.exp(rng.normal(np.log(_MEDIAN), _SIGMA, -(-tokens // _SHORTEST))).astype(np.int64)
        lengths = drawn.clip(_SHORTEST, _LONGEST)
    else:
        lengths = np.full(-(-tokens // _LONG), _LONG)
    ends = lengths.cumsum().clip(max=tokens)
    return np.diff(ends, prepend=0)[: int(np.searchsorted(ends, tokens)) + 1]
