"""infinity's engine without its HTTP server. It sorts the texts in its queue by length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from .serving import Answer, Vectors


class InfinityAdapter:
    """`AsyncEmbeddingEngine.embed` on torch, in fp32. The batch size is an option for loading."""

    def __init__(self, model: Path, threads: int, batch: int) -> None:
        torch.set_num_threads(threads)
        self._loop = asyncio.new_event_loop()
        arguments = EngineArgs(
            model_name_or_path=str(model),
            engine="torch",
            device="cpu",
            dtype="float32",
            batch_size=batch,
            bettertransformer=False,  # optimum's, which these transformers no longer have
            model_warmup=False,
        )
        self._engine = AsyncEmbeddingEngine.from_args(arguments)
        self._loop.run_until_complete(self._engine.astart())

    def encode(self, texts: Sequence[str]) -> Vectors:
        """One request, through its queue."""
        return self._loop.run_until_complete(self._embed(texts))

    def requests(self, requests: Sequence[Sequence[str]], callers: int = 0) -> list[Answer]:
        """The answers to all requests. At most `callers` of them are in its queue at once; with 0, all are."""
        free = asyncio.Semaphore(callers or len(requests))

        async def answer(texts: Sequence[str]) -> Answer:
            async with free:
                began = time.monotonic()
                return Answer(await self._embed(texts), began, time.monotonic())

        async def answers() -> list[Answer]:
            return await asyncio.gather(*map(answer, requests))

        return self._loop.run_until_complete(answers())

    def count(self, texts: Sequence[str]) -> int:
        """By its own tokenizer; the count that it returns leaves out special tokens."""
        features = self._engine._model_replicas[0].encode_pre(list(texts))
        return int(features["attention_mask"].sum())

    def close(self) -> None:
        """Stop its threads, which would keep the process alive."""
        self._loop.run_until_complete(self._engine.astop())

    async def _embed(self, texts: Sequence[str]) -> Vectors:
        vectors, _ = await self._engine.embed(sentences=list(texts))
        return np.asarray(vectors, np.float32)
