"""Makes chunks from texts, and encodes texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk

#: A budget so small that a test's texts make many batches (tokens).
BUDGET = 96


def chunk_of(*texts: str | bytes, kinds: dict[int, RecordKind] | None = None) -> ChunkInput:
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    return ChunkInput(0, bytes((kinds or {}).get(row, RecordKind.TEXT) for row in range(len(data))), data)


def encode(backend: Backend, texts: Sequence[str], budget: int = BUDGET, **options: Any) -> EncodedChunk:
    """Encode texts as one chunk; all of them must have vectors."""
    encoder = ChunkEncoder(backend, budget)
    encoded = encoder.encode(encoder.prepare(chunk_of(*texts), options))
    assert encoded.errors == []
    return encoded


def encode_rows(
    backend: Backend,
    texts: Sequence[str],
    rows: Sequence[int] | None = None,
    *,
    prompt: str | None = None,
    normalize: bool = True,
) -> Vectors:
    """The vectors of some rows of the texts, or of all, in one batch."""
    tokens = backend.tokenize(texts, prompt)
    picked = np.arange(len(texts)) if rows is None else np.array(rows, np.int64)
    return backend.finish(backend.forward(tokens, picked), normalize=normalize)
