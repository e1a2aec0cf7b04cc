"""What the tests of backend `torch-gpu` share: small models, texts, and vectors to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embedctl_workers.arrays.tokens import Ragged, Tokens, Vectors
from embedctl_workers.backends.gpu.backend import TorchGpuBackend
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from tests.support.chunks import chunk_of
from tests.support.tiny_models import Tiny

Load = Callable[..., TorchGpuBackend]

BERT = Tiny(hidden=64, heads=4)
QWEN = Tiny("qwen3", pooling="lasttoken", normalize=True)
WORDS = ("the", "text", "of", "models", "reading", "2024", "äöü", "query")


def texts_of(lengths: Sequence[int]) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def encode(backend: TorchGpuBackend, texts: Sequence[str], budget: int = 96, **options: Any) -> EncodedChunk:
    return encode_with(ChunkEncoder(backend, budget), texts, **options)


def encode_with(encoder: ChunkEncoder, texts: Sequence[str], **options: Any) -> EncodedChunk:
    return encoder.encode(encoder.prepare(chunk_of(*texts), {"normalize": False, **options}))


def tokens_of(ids: Sequence[Sequence[int]]) -> Tokens:
    lengths = np.array([len(each) for each in ids])
    types = [[0] * len(each) for each in ids]
    columns = {"input_ids": Ragged.of(ids), "token_type_ids": Ragged.of(types)}
    return Tokens(lengths, np.zeros_like(lengths), columns)


def cosines(found: Vectors, expected: Vectors) -> Vectors:
    found, expected = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (found, expected))
    of_each: Vectors = (found * expected).sum(axis=1)
    return of_each
