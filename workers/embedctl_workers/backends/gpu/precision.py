"""The choice of a model's type: the 16-bit type that is nearer to float32 on the gate's texts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from embedctl_config.errors import ModelError
from embedctl_workers.arrays.distance import measure
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.redaction import first_line

log = logging.getLogger(__name__)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """The type to compute in, and why, in words."""

    dtype: torch.dtype
    why: str


def choose(candidates: Sequence[torch.dtype], references: Vectors, encode: Callable[[torch.dtype], Vectors]) -> Choice:
    """The candidate whose vectors are nearest to the references, those of torch in float32, texts × dim.

    The first one wins a tie; `encode` computes vectors of the same texts in a type. A ModelError if no candidate gives
    finite ones.
    """
    errors = {dtype: _error(dtype, references, encode) for dtype in candidates}
    best = min(errors, key=lambda dtype: errors[dtype])
    if not math.isfinite(errors[best]):
        raise ModelError("the model can't be computed in 16 bits here: set the class's option dtype to fp32")
    others = [f"{_NAMES[dtype]} {_in_words(error)}" for dtype, error in errors.items() if dtype != best]
    return Choice(best, f"{_NAMES[best]} (off by {_in_words(errors[best])}{''.join(f', {each}' for each in others)})")


def forced(dtype: str) -> Choice:
    return Choice(DTYPES[dtype], dtype)


def full_precision() -> None:
    """Turn off TF32 and partial sums in 16 bits: float32 keeps its precision, and sums of products are rounded once."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _error(dtype: torch.dtype, references: Vectors, encode: Callable[[torch.dtype], Vectors]) -> float:
    """The largest difference of a component, for vectors of unit length; infinite if it can't be computed."""
    try:
        error = measure(encode(dtype), references).max_abs_error
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as failed:
        log.warning("%s does not run here: %s", _NAMES[dtype], first_line(failed))
        return math.inf
    return error if math.isfinite(error) else math.inf


def _in_words(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "not finite"
