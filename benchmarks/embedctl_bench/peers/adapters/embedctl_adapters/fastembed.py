"""fastembed on a local model. It does not sort by length; before 0.9 it truncated at `tokenizer.json`'s 128 tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

from .serving import Vectors


class FastembedAdapter:
    """`TextEmbedding.embed`, with the model's own maximum length forced; `sort` gives it texts by length."""

    def __init__(self, model: Path, threads: int) -> None:
        pooling = json.loads((model / "1_Pooling" / "config.json").read_text())
        config = json.loads((model / "config.json").read_text())
        TextEmbedding.add_custom_model(
            model=model.name,
            pooling=PoolingType[pooling["pooling_mode"].upper()],
            normalization=True,
            sources=ModelSource(url=model.as_uri()),
            dim=config["hidden_size"],
            model_file="onnx/model.onnx",
        )
        self._model = TextEmbedding(
            model.name, specific_model_path=str(model), threads=threads, providers=["CPUExecutionProvider"]
        )
        self._tokenizer = self._model.model.tokenizer
        self._tokenizer.enable_truncation(config["max_position_embeddings"])

    def encode(self, texts: Sequence[str], batch: int, sort: bool) -> Vectors:
        """Encode in batches, in the order of the texts or of their lengths."""
        order = sorted(range(len(texts)), key=lambda at: len(texts[at])) if sort else list(range(len(texts)))
        vectors = np.empty((len(texts), self._model.embedding_size), np.float32)
        vectors[order] = list(self._model.embed([texts[at] for at in order], batch_size=batch))
        return vectors

    def count(self, texts: Sequence[str]) -> int:
        """After truncation to the forced length."""
        return sum(sum(each.attention_mask) for each in self._tokenizer.encode_batch(list(texts)))
