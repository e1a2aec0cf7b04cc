"""Memory for activations, kept from batch to batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
#: What is computed on: an array, or a tensor in the CPU's memory.
Matrix: TypeAlias = "Array | torch.Tensor"
#: Bytes of a line of the CPUs' caches, and of their largest vector.
_LINE = 64


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
    """An array with arbitrary values that begins with a line of the cache; NumPy's own begin a quarter into one."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


class Buffers:
    """Named matrices whose memory is reused by the next batch. A matrix is valid until its name is asked for again.

    The allocator would give memory of this size back to the system after each batch, and taking it again costs page
    faults. Each name keeps as much as its largest matrix so far needed.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def __call__(self, name: str, rows: int, width: int, dtype: npt.DTypeLike = np.float32) -> Array:
        """A matrix of this shape with arbitrary values."""
        size = rows * width
        kept = self._kept.get(name)
        if kept is None or kept.dtype != dtype or len(kept) < size:
            self._kept.pop(name, None)  # not both at once
            kept = self._kept[name] = empty((size,), dtype)
        return kept[:size].reshape(rows, width)
