"""The texts that every system gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Workload:
    """Texts for all systems.

    Attributes:
        lengths: of the texts, in tokens of the model, special tokens included.
        chunk: the largest number of texts that a process gets at once.
    """

    name: str
    texts: Sequence[str]
    lengths: tuple[int, ...]
    chunk: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:32]
