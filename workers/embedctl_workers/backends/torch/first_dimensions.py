"""Keeps the first dimensions of a vector, where a model's configuration says so (`truncate_dim`)."""

from __future__ import annotations

from typing import Any

import torch


class FirstDimensions(torch.nn.Module):
    """The last module of such a model. In sentence-transformers, `encode` does this after the last module."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "sentence_embedding": features["sentence_embedding"][:, : self.dimensions]}
