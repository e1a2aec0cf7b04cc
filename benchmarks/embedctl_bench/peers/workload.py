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
        lengths: of the texts, in tokens of the model that it is for; special tokens are included.
        chunk: most texts that are dealt to a process at once.
    """

    name: str
    path: Path
    lengths: tuple[int, ...]
    chunk: int

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(self.lengths)

    @cached_property
    def digest(self) -> str:
        """Tells it from others."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]
