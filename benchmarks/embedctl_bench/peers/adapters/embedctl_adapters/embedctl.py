"""Our own engine, called directly: a worker's steps for a chunk, without the queue."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedctl.corpus.rows import Rows, records_of
from embedctl.queueing.chunk_sizes import chunks_of
from embedctl_config.hardware import HardwareClass, ModelEntry
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.known_good import load_encoder
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
        return encoded(self._encoder, texts, self._settings)

    def count(self, texts: Sequence[str]) -> int:
        """After truncation."""
        chunks = _chunks(texts, self._settings)
        return sum(int(self._encoder.prepare(each, _OPTIONS).tokens.lengths.sum()) for each in chunks)


def encoded(encoder: ChunkEncoder, texts: Sequence[str], settings: Settings) -> Vectors:
    """The vectors as a worker computes them, in chunks of the size that is set."""
    chunks = _chunks(texts, settings)
    return np.concatenate([encoder.encode(encoder.prepare(each, _OPTIONS)).vectors for each in chunks])


def _chunks(texts: Sequence[str], settings: Settings) -> Iterator[ChunkInput]:
    records = records_of(texts, Rows(settings.max_text_bytes))
    return chunks_of(records, max_rows=settings.chunk_size, max_bytes=settings.chunk_bytes)
