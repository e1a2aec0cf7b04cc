"""infinity's engine without its HTTP server. It sorts what waits in its queue by length."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs


class Engine:
    """`AsyncEmbeddingEngine.embed` on torch, in fp32. The batch size is one of loading."""

    def __init__(self, model: Path, threads: int, batch: int) -> None:
        torch.set_num_threads(threads)
        self._loop = asyncio.new_event_loop()
        arguments = EngineArgs(
            model_name_or_path=str(model),
            engine="torch",
            device="cpu",
            dtype="float32",
            batch_size=batch,
            bettertransformer=False,  # optimum's, which this transformers has no more
            model_warmup=False,
        )
        self._engine = AsyncEmbeddingEngine.from_args(arguments)
        self._loop.run_until_complete(self._engine.astart())

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors, _ = self._loop.run_until_complete(self._engine.embed(sentences=list(texts)))
        return np.asarray(vectors, np.float32)

    def count(self, texts: Sequence[str]) -> int:
        features = self._engine._model_replicas[0].encode_pre(list(texts))  # its own count leaves out special tokens
        return int(features["attention_mask"].sum())
