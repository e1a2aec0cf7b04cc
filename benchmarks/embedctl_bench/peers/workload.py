"""Texts and requests in files, which every system gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from embedctl_config.durable import write


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
        return sum(self.lengths)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:32]


def kept(texts: Sequence[Any], place: Path, name: str) -> Path:
    """A file with these texts, as JSON."""
    data = json.dumps(texts).encode()
    path = place / "workloads" / f"{name}-{hashlib.sha256(data).hexdigest()[:32]}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, data)
    return path
