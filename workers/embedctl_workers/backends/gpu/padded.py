"""Any model through its own modules, on padded batches: the transformer in 16 bits, the rest in float32."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from transformers import PreTrainedModel

from embedctl_config.errors import ModelError
from embedctl_workers.arrays.padding import Padding
from embedctl_workers.arrays.tokens import Rows, Tokens
from embedctl_workers.backends.gpu.masks import look_at_no_masks, masking
from embedctl_workers.backends.gpu.pooling import HostIndexedPooling
from embedctl_workers.backends.gpu.transfer import Batch
from embedctl_workers.backends.torch.packed.inputs import check_within

#: Widths are multiples of this, because matrix products and attention are fastest then.
_STEP = 16


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of a batch that are not in its arrays; `pads`: whether any token is padding."""

    prompt_tokens: int | None
    pads: bool


class PaddedGpuEngine:
    """Runs a model through its own modules. Its methods are those of :class:`.packed.PackedGpuEngine`.

    The model is in float32, on the host, and is copied. No text, and no batch, is wider than `longest` tokens. A
    ModelError if its first module is not a transformer of sentence-transformers.
    """

    name = "padded, SDPA"

    def __init__(
        self,
        model: SentenceTransformer,
        padding: Padding,
        device: torch.device,
        dtype: torch.dtype,
        longest: int,
    ) -> None:
        self._first, *self._rest = [copy.deepcopy(module).to(device) for module in model]
        if not isinstance(self._first, Transformer):
            kind = type(self._first).__name__
            raise ModelError(f"this backend needs a model that begins with a Transformer, not with {kind}")
        look_at_no_masks()
        self._rest = [HostIndexedPooling.like(module) for module in self._rest]
        # Buffers keep their type: in 16 bits, the frequencies of rotary embeddings lose the positions of long texts.
        kept = _kept_in_fp32(self._first.auto_model, dtype)
        for name, parameter in self._first.named_parameters():
            if not any(f".{each}." in f".{name}." for each in kept):
                parameter.data = parameter.data.to(dtype)
        self._padding = padding
        self._longest = longest
        self._words = int(self._first.auto_model.get_input_embeddings().num_embeddings)

    def batch(self, tokens: Tokens, rows: Rows) -> Batch:
        lengths = tokens.lengths[rows]
        width = self._width(lengths)
        arrays = self._padding(tokens, rows, width)
        check_within(arrays["input_ids"], self._words)
        return Batch(arrays, _Facts(tokens.prompt_tokens, pads=bool((lengths < width).any())))

    def run(self, inputs: Mapping[str, torch.Tensor], facts: _Facts) -> torch.Tensor:
        features: dict[str, Any] = {name: values.long() for name, values in inputs.items()}
        features["modality"] = "text"
        if facts.prompt_tokens is not None:
            features["prompt_length"] = facts.prompt_tokens
        with masking(padded=facts.pads):
            features = self._first(features)
        features = {name: _in_float32(value) for name, value in features.items()}
        for module in self._rest:
            features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def widened(self) -> PaddedGpuEngine:
        other = copy.copy(self)
        other._first = copy.deepcopy(self._first).float()
        return other

    def positions(self, lengths: Rows) -> int:
        return len(lengths) * self._width(lengths) if len(lengths) else 0

    def _width(self, lengths: Rows) -> int:
        longest = int(lengths.max())
        return max(longest, min(self._longest, -(-longest // _STEP) * _STEP))


def keeps_fp32(module: torch.nn.Module) -> bool:
    """Whether transformers says of parts of this model that fp16 is not enough for them."""
    return isinstance(module, Transformer) and bool(_kept_in_fp32(module.auto_model, torch.float16))


def _kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Names of modules that transformers leaves in float32 when it loads the model in this type."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    return kept | set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else kept


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
