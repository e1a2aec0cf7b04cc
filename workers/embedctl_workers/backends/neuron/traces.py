"""The list of the traces in an artefact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "traces.json"


@dataclass(frozen=True, slots=True)
class Traces:
    """The traces in a folder: each takes `inputs` in order, and `batch` rows; `buckets`, their lengths, ascend."""

    inputs: Sequence[str]
    buckets: Sequence[int]
    batch: int

    @classmethod
    def read(cls, folder: Path) -> Traces:
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def trace_file(folder: Path, bucket: int) -> Path:
    return folder / f"bucket-{bucket}.pt"
