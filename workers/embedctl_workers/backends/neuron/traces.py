"""Which traces an artefact holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "traces.json"


@dataclass(frozen=True, slots=True)
class Traces:
    """The traces in a folder.

    Attributes:
        inputs: their arguments, in order.
        buckets: their lengths in tokens, rising.
        batch: rows of each.
    """

    inputs: Sequence[str]
    buckets: Sequence[int]
    batch: int

    @classmethod
    def read(cls, folder: Path) -> Traces:
        """From an artefact's folder."""
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Into an artefact's folder."""
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def trace_file(folder: Path, bucket: int) -> Path:
    """Where the trace of a length is."""
    return folder / f"bucket-{bucket}.pt"
