"""An artefact to build: its request, and the function that fills its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embedctl_workers.models.artifacts import Wanted

MINE = Wanted("ab" * 32, {"kind": "onnx", "exporter": "own"})
FACTS: dict[str, Any] = {
    "model": {"name": "mine", "weights_bytes": 10},
    "engine": "an engine",
    "graph": {"name": "plain"},
    "accuracy": {"min_cosine": 1.0, "mean_cosine": 1.0},
}


class Fill:
    """Writes two files and counts its calls."""

    def __init__(self, content: bytes = b"weights") -> None:
        self.calls = 0
        self._content = content

    def __call__(self, folder: Path) -> dict[str, Any]:
        self.calls += 1
        (folder / "model.onnx").write_bytes(self._content)
        (folder / "tokenizer.json").write_text("{}")
        return FACTS
