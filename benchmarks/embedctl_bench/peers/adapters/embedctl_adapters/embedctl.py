"""Our own engine, called directly: what a worker does with a chunk, less the queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from embedctl.chunking import chunks_of
from embedctl.records import records_of
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput
from embedctl_workers.encoding.loading import load_encoder
from embedctl_workers.machine.host import Host

from .serving import Vectors

_OPTIONS = {"normalize": True}


class Engine:
    """`ChunkEncoder` over chunks of `chunk` records, with a hardware class's own options."""

    def __init__(self, model: Path, threads: int, chunk: int, cache: str, hardware: str = "cpu") -> None:
        self._settings = Settings(chunk_size=chunk, models={model.name: ModelEntry(source=str(model))})
        entry = self._settings.hardware_class(hardware)
        # As a worker loads it: what a class leaves open, such as its token budget, is settled there.
        self._encoder = load_encoder(self._settings, entry, model.name, Host(threads=threads, cache=Path(cache)))

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Chunk after chunk."""
        encoder = self._encoder
        return np.concatenate(
            [encoder.encode(encoder.prepare(chunk, _OPTIONS)).vectors for chunk in self._chunks(texts)]
        )

    def count(self, texts: Sequence[str]) -> int:
        """After the model's cut."""
        return sum(int(self._encoder.prepare(each, _OPTIONS).tokens.lengths.sum()) for each in self._chunks(texts))

    def _chunks(self, texts: Sequence[str]) -> list[ChunkInput]:
        settings = self._settings
        records = records_of(texts, max_bytes=settings.max_text_bytes)
        return list(chunks_of(records, max_rows=settings.chunk_size, max_bytes=settings.chunk_bytes))
