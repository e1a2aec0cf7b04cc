"""Our own engine, called directly: a worker's steps for a chunk, without the queue."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedctl.chunking import chunks_of
from embedctl.records import records_of
from embedctl_config.hardware import HardwareClass, ModelEntry
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput
from embedctl_workers.encoding.loading import load_encoder
from embedctl_workers.machine.devices import Pinned
from embedctl_workers.machine.host import Host

from .serving import Vectors

_OPTIONS = {"normalize": True}


class EngineAdapter:
    """`ChunkEncoder` over chunks of `chunk` records, with the fields of a hardware class's entry.

    Attributes:
        computes: the engine that the backend chose.
    """

    def __init__(
        self, model: Path, threads: int, chunk: int, cache: str, hardware: str, entry: Mapping[str, Any]
    ) -> None:
        classes = {hardware: HardwareClass(**entry)}
        self._settings = Settings(chunk_size=chunk, models={model.name: ModelEntry(source=str(model))}, classes=classes)
        cpus = frozenset(os.sched_getaffinity(0))
        host = Host(threads=threads, cache=Path(cache), places=Pinned(cpus, threads).places)
        # As a worker loads it: this settles what the class leaves open, such as its token budget.
        self._encoder = load_encoder(self._settings, classes[hardware], model.name, host)
        self.computes = self._encoder.backend.engine

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Chunk after chunk."""
        encoder = self._encoder
        return np.concatenate(
            [encoder.encode(encoder.prepare(chunk, _OPTIONS)).vectors for chunk in self._chunks(texts)]
        )

    def count(self, texts: Sequence[str]) -> int:
        """After truncation."""
        return sum(int(self._encoder.prepare(each, _OPTIONS).tokens.lengths.sum()) for each in self._chunks(texts))

    def _chunks(self, texts: Sequence[str]) -> list[ChunkInput]:
        settings = self._settings
        records = records_of(texts, max_bytes=settings.max_text_bytes)
        return list(chunks_of(records, max_rows=settings.chunk_size, max_bytes=settings.chunk_bytes))
