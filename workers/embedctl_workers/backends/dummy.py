"""Vectors without a model: deterministic, for tests of everything around it and for load tests of the queue."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from embedctl_config.hardware import ModelEntry
from embedctl_workers.backends.base import Rows, Tokens, Vectors


class DummyBackend:
    """A vector is drawn from the sha256 of its tokens; a token is a word.

    Options: `dim`, `max_tokens`, `seconds_per_batch` (sleeps that long), `seed` (another one is another fingerprint),
    `fail_on` (a word that makes a batch fail).
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("dim", "max_tokens", "seconds_per_batch", "seed", "fail_on")

    def __init__(
        self, *, dim: int = 8, max_tokens: int = 256, seconds_per_batch: float = 0.0, seed: int = 0, fail_on: str = ""
    ) -> None:
        self.dim = dim
        self.max_tokens = max_tokens
        self._seconds = seconds_per_batch
        self._seed = seed
        self._fail_on = _token(fail_on) if fail_on else None
        self.fingerprint = hashlib.sha256(f"dummy {dim} {max_tokens} {seed}".encode()).hexdigest()

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, threads: int, options: Mapping[str, Any]) -> Self:
        return cls(**options)

    def tokenize(self, texts: Sequence[str], prompt: str | None) -> Tokens:
        words = [[_token(word) for word in ((prompt or "") + text).split()] for text in texts]
        counts = np.array([len(row) for row in words], np.int64)
        used = np.minimum(counts, self.max_tokens)
        return Tokens(
            lengths=np.maximum(used, 1),
            lost=counts - used,
            columns={"input_ids": [row[: self.max_tokens] for row in words]},
        )

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        if self._seconds:
            time.sleep(self._seconds)
        ids = tokens.columns["input_ids"]
        if any(self._fail_on in ids[row] for row in rows):
            raise RuntimeError("a text holds the word that this backend was told to fail on")
        return np.stack([self._vector(ids[row]) for row in rows])

    def finish(self, output: Vectors, *, normalize: bool) -> Vectors:
        return output / np.linalg.norm(output, axis=1, keepdims=True) if normalize else output

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _vector(self, ids: Sequence[int]) -> Vectors:
        words = hashlib.shake_256(f"{self._seed} {list(ids)}".encode()).digest(2 * self.dim)
        # Centred on zero and never all zero, so that it has a direction.
        return (np.frombuffer(words, "<u2").astype(np.float32) - 32767.5) / 32767.5


def _token(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest())
