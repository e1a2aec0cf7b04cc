"""softmax(q kᵀ) v for each text of a packed batch and each head."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.backends.gpu.device import Gpu
from embedctl_workers.redaction import first_line

log = logging.getLogger(__name__)

#: The widths that texts are padded to (tokens): narrow steps where most texts are; above 16, none wastes more than a
#: third.
_WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: FlashAttention takes head sizes that are multiples of 8, up to this one.
_LARGEST_HEAD = 256
#: The largest difference allowed between packed and plain attention in 16 bits, for values of about 1.
_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The part of a batch's attention that is decided on the host.

    `arrays` holds integer arrays for the device, by name, `groups` (rows, width) of texts that are padded together.
    """

    arrays: Mapping[str, np.ndarray[Any, Any]]
    groups: tuple[tuple[int, int], ...]
    longest: int


class Varlen:
    """torch's attention over packed texts, 16 bits: FlashAttention's kernels (`torch.nn.attention.varlen`)."""

    #: For people.
    NAME: ClassVar[str] = "varlen"

    def __init__(self, function: Any) -> None:
        self._function = function

    def plan(self, offsets: Rows) -> AttentionPlan:
        """Plan the attention of a batch; `offsets` as in :class:`.packed.inputs.Packed`."""
        return AttentionPlan({}, (), int(np.diff(offsets).max()))

    def __call__(self, qkv: torch.Tensor, inputs: Mapping[str, torch.Tensor], plan: AttentionPlan) -> torch.Tensor:
        """tokens × 3 × heads × size → tokens × heads × size.

        `inputs` are the plan's arrays and the offsets.
        """
        query, key, value = qkv.unbind(1)
        at = inputs["offsets"]
        found: torch.Tensor = self._function(query, key, value, at, at, plan.longest, plan.longest)
        return found


class Bucketed:
    """torch's plain attention on texts of similar lengths, padded to one width and masked: any type, any device."""

    NAME: ClassVar[str] = "SDPA"

    def plan(self, offsets: Rows) -> AttentionPlan:
        lengths = np.diff(offsets)
        widths = _widths_of(lengths)
        gathered, lengths_in_order, groups = [], [], []
        place = np.empty(int(offsets[-1]), np.int64)
        before = 0
        for width in np.unique(widths).tolist():
            texts = np.flatnonzero(widths == width)
            step = np.arange(width)
            real = step < lengths[texts, None]
            # A text is padded with copies of its own last token: every text has one, and the copies are masked.
            tokens = offsets[texts, None] + np.minimum(step, lengths[texts, None] - 1)
            place[tokens[real]] = before + np.flatnonzero(real.ravel())
            gathered.append(tokens.ravel())
            lengths_in_order.append(lengths[texts])
            groups.append((len(texts), width))
            before += len(texts) * width
        arrays = {
            "padded": np.concatenate(gathered),
            "place": place,
            "padded_lengths": np.concatenate(lengths_in_order),
        }
        return AttentionPlan(arrays, tuple(groups), int(lengths.max()))

    def __call__(self, qkv: torch.Tensor, inputs: Mapping[str, torch.Tensor], plan: AttentionPlan) -> torch.Tensor:
        heads, size = qkv.shape[2:]
        made, token, text = [], 0, 0
        for rows, width in plan.groups:
            chosen = qkv[inputs["padded"][token : token + rows * width]].view(rows, width, 3, heads, size)
            query, key, value = chosen.permute(2, 0, 3, 1, 4)
            step = torch.arange(width, device=qkv.device)
            mask = step < inputs["padded_lengths"][text : text + rows, None]
            context = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
            made.append(context.transpose(1, 2).reshape(rows * width, heads, size))
            token, text = token + rows * width, text + rows
        return torch.cat(made)[inputs["place"]]


Attention = Varlen | Bucketed


def avoid_cudnn() -> None:
    """Keep torch's plain attention from cuDNN. It takes 0.4 s to plan a new shape, and most batches have a new one.

    From cuDNN 9.15 on, torch prefers it on compute capabilities 9 and 10 (aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp, check_prefer_cudnn_attention).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def attention_for(device: Gpu, dtype: torch.dtype, heads: int, size: int) -> Attention:
    """The fastest attention that works on this device for heads of this size, as a trial shows."""
    fitting = dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= _LARGEST_HEAD
    if not (device.varlen and fitting):
        return Bucketed()
    try:
        from torch.nn.attention.varlen import varlen_attn

        attention = Varlen(varlen_attn)
        error = _difference(attention, device.device, dtype, heads, size)
    except (ImportError, RuntimeError) as failed:
        log.warning("attention is padded, not packed: torch's varlen_attn does not run here: %s", first_line(failed))
        return Bucketed()
    if error <= _TOLERANCE:
        return attention
    log.warning("attention is padded, not packed: torch's varlen_attn is wrong by %.2g here", error)
    return Bucketed()


def _difference(attention: Attention, device: torch.device, dtype: torch.dtype, heads: int, size: int) -> float:
    """The largest difference of an attention from the plain one, on three texts of odd lengths; inf if not finite."""
    offsets = np.array([0, 37, 38, 139])
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(139, 3, heads, size, generator=generator).to(device, dtype)
    found, expected = (_attend(each, qkv, offsets) for each in (attention, Bucketed()))
    error = (found - expected).abs().max().item()
    return error if np.isfinite(error) else float("inf")


def _attend(attention: Attention, qkv: torch.Tensor, offsets: Rows) -> torch.Tensor:
    plan = attention.plan(offsets)
    arrays = {**plan.arrays, "offsets": offsets}
    inputs = {name: torch.from_numpy(array).to(qkv.device, torch.int32) for name, array in arrays.items()}
    return attention(qkv, inputs, plan).float()


def _widths_of(lengths: Rows) -> Rows:
    """The width that each text is padded to; beyond the widest step, a multiple of it."""
    step = _WIDTHS[-1]
    named = np.array(_WIDTHS)[np.minimum(np.searchsorted(_WIDTHS, lengths), len(_WIDTHS) - 1)]
    return np.where(lengths > step, -(-lengths // step) * step, named)
