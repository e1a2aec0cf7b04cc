"""Engines with random weights, and batches of them on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from benchmarks.ours.gpu_probe.device import Probed
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import BertConfig, BertModel

from embedctl_bench.measuring.shapes import MAX_TOKENS, ModelShape
from embedctl_workers.arrays.tokens import Ragged, Rows, Tokens
from embedctl_workers.backends.gpu.packed import PackedGpuEngine
from embedctl_workers.backends.torch.packed.weights import weights_of


@dataclass(frozen=True, slots=True)
class UploadedBatch:
    """A batch on the device, as the engine's `run` takes it."""

    inputs: Mapping[str, torch.Tensor]
    facts: Any


def engine_of(shape: ModelShape, probed: Probed) -> PackedGpuEngine:
    """The engine for packed tokens, with random weights and mean pooling."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.hidden,
        max_position_embeddings=MAX_TOKENS,
    )
    weights = weights_of(BertModel(config).train(False))
    assert weights is not None
    return PackedGpuEngine(weights, [Pooling(shape.hidden, "mean")], probed.gpu, probed.dtype, MAX_TOKENS)


def tokens_of(lengths: Rows) -> Tokens:
    """Texts of these lengths. Their words differ, so that a row of the wrong text shows."""
    ids = [np.arange(1000 + number, 1000 + number + length).tolist() for number, length in enumerate(lengths)]
    return Tokens(lengths, np.zeros_like(lengths), {"input_ids": Ragged.of(ids)})


def uploaded(engine: PackedGpuEngine, lengths: Rows, probed: Probed) -> UploadedBatch:
    """A batch of texts of these lengths."""
    batch = engine.batch(tokens_of(lengths), np.arange(len(lengths)))
    arrays = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.arrays.items()}
    return UploadedBatch({name: array.to(probed.device, torch.int32) for name, array in arrays.items()}, batch.facts)
