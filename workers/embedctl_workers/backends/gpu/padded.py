"""Any model through its own modules, on padded batches: the transformer in 16 bits, the rest in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from embedctl_config.errors import ModelError
from embedctl_config.outputs import Output
from embedctl_workers.arrays.padding import Padding, used_places
from embedctl_workers.arrays.tokens import SCORED, Rows, Tokens
from embedctl_workers.backends.gpu.pooling import HostIndexedPooling
from embedctl_workers.backends.gpu.transfer import Batch
from embedctl_workers.backends.torch.loading import modules_of
from embedctl_workers.backends.torch.packed.inputs import check_within

#: Whether any token of the batch is padding; None outside of :func:`masking`, where transformers looks by itself.
_padded: ContextVar[bool | None] = ContextVar("padded", default=None)
#: The input that tells the tokens of a batch from its padding, where heads take them.
_USED = "used"
#: Widths are multiples of this, because matrix products and attention are fastest then.
_STEP = 16


def look_at_no_masks() -> None:
    """Let transformers' models make their masks as :func:`masking` says.

    Otherwise each forward looks whether any token is padding (masking_utils.py, `padding_mask.all()`). It then waits
    for the device, and the next batch can't be begun meanwhile. The host knows the answer.
    """
    AttentionMaskInterface.register("sdpa", _told(sdpa_mask))
    AttentionMaskInterface.register("eager", _told(eager_mask))


@contextmanager
def masking(*, padded: bool) -> Iterator[None]:
    """A context for the forward of a batch in which some tokens are padding, or none is."""
    before = _padded.set(padded)
    try:
        yield
    finally:
        _padded.reset(before)


def _told(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes masks, which does not look whether they mask anything. It makes None if they do not."""

    def mask(*args: Any, **facts: Any) -> Any:
        match _padded.get():
            case True:
                facts |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            case False:
                facts |= {"attention_mask": None}
        return make(*args, **facts)

    return mask


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of a batch that are not in its arrays; `pads`: whether any token is padding."""

    prompt_tokens: int | None
    pads: bool
    outputs: tuple[Output, ...]


class PaddedGpuEngine:
    """Runs a model through its own modules. Its methods are those of :class:`.packed.PackedGpuEngine`.

    The model is in float32, on the host, and is copied. No text, and no batch, is wider than `longest` tokens. A
    ModelError if its first module is not a transformer of sentence-transformers.
    """

    name = "padded, SDPA"

    def __init__(
        self,
        model: SentenceTransformer,
        heads: Mapping[Output, Any],
        device: torch.device,
        dtype: torch.dtype,
        longest: int,
    ) -> None:
        self._first, *self._rest = [copy.deepcopy(module).to(device) for module in modules_of(model)]
        self._heads = {output: copy.deepcopy(head).to(device) for output, head in heads.items()}
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
        self._padding = Padding.of(model.tokenizer)
        self._longest = longest
        self._words = int(self._first.auto_model.get_input_embeddings().num_embeddings)

    def batch(self, tokens: Tokens, rows: Rows) -> Batch:
        lengths = tokens.lengths[rows]
        width = self._width(lengths)
        arrays = self._padding(tokens, rows, width)
        arrays.pop(SCORED, None)
        check_within(arrays["input_ids"], self._words)
        if any(output in self._heads for output in tokens.outputs):
            arrays[_USED] = np.flatnonzero(used_places(tokens, rows, width))
        pads = bool((lengths < width).any()) or not arrays["attention_mask"].all()
        return Batch(arrays, _Facts(tokens.prompt_tokens, pads, tokens.outputs))

    def run(self, inputs: Mapping[str, torch.Tensor], facts: _Facts) -> dict[Output, torch.Tensor]:
        features: dict[str, Any] = {name: values.long() for name, values in inputs.items()}
        used = features.pop(_USED, None)
        features["modality"] = "text"
        if facts.prompt_tokens is not None:
            features["prompt_length"] = facts.prompt_tokens
        with masking(padded=facts.pads):
            features = self._first(features)
        features = {name: _in_float32(value) for name, value in features.items()}
        for module in self._rest:
            features = module(features)
        found = {}
        for output in facts.outputs:
            if head := self._heads.get(output):
                found[output] = head.of_tokens(features["token_embeddings"].flatten(0, 1).index_select(0, used))
            else:
                found[output] = features["sentence_embedding"]
        return found

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
