"""The vectors of the stand-in for a GPU: cheap, exact, and a function of a text's own tokens and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

#: How many different rows vectors are taken from: a prime number, few enough for a CPU's cache.
_ROWS = 1021
#: The first component tells apart texts that share a row.
_SCALE = 8191


@dataclass(frozen=True, slots=True)
class Tables:
    """What vectors are looked up in.

    Attributes:
        weights: int64, a number for each id of the vocabulary.
        rows: float32, :data:`_ROWS` × dim.
    """

    weights: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]

    @classmethod
    def of(cls, vocabulary: int, dim: int) -> Self:
        """The tables of a model of this size, always the same ones."""
        generator = np.random.default_rng(0)
        weights = generator.integers(1 << 30, size=vocabulary)
        return cls(weights, generator.standard_normal((_ROWS, dim), np.float32))

    def expected(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """The vector of a text with these ids, of unit length, float32."""
        total = int((self.weights[ids] * np.arange(1, len(ids) + 1)).sum())
        vector = self.rows[total % _ROWS].astype(np.float64)
        vector[0] = total % _SCALE / _SCALE
        found: np.ndarray[Any, Any] = (vector / np.linalg.norm(vector)).astype(np.float32)
        return found


class TorchTables:
    """The same for packed texts, in torch. Sums are of integers, so a text's place in its batch changes no bit."""

    def __init__(self, tables: Tables) -> None:
        import torch

        self._weights, self._rows = torch.from_numpy(tables.weights), torch.from_numpy(tables.rows)

    def __call__(self, ids: Any, places: Any, offsets: Any) -> Any:
        """Vectors that are not normalised: float32, texts × dim.

        Args:
            ids, places: int32, one for each token; its id, and its place in its text, from 0.
            offsets: int32, the begin of each text, then the end of the last one.
        """
        import torch

        sums = torch.zeros(len(ids) + 1, dtype=torch.int64)
        torch.cumsum(self._weights[ids] * (places + 1), 0, out=sums[1:])
        ends = sums[offsets]
        totals = ends[1:] - ends[:-1]
        vectors = self._rows.index_select(0, totals % _ROWS)
        vectors[:, 0] = (totals % _SCALE).double() / _SCALE
        return vectors
