"""The texts that every system encodes, in a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """Texts in the file `path`, a JSON list.

    Attributes:
        lengths: of the texts, in tokens of the model, special tokens included.
        chunk: the largest number of texts that a process gets at once.
    """

    name: str
    path: Path
    lengths: tuple[int, ...]
    chunk: int

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.lengths)

    @cached_property
    def digest(self) -> str:
        """A digest of the texts."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]
