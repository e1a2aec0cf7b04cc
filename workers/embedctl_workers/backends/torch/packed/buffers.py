"""Memory for activations, kept from batch to batch."""

from __future__ import annotations

import torch


class Buffers:
    """Named matrices whose memory is reused by the next batch. A matrix is valid until its name is asked for again.

    The allocator would give memory of this size back to the system after each batch, and taking it again costs page
    faults. Each name keeps as much as its largest matrix so far needed.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A matrix of this shape with arbitrary values."""
        size = rows * width
        kept = self._kept.get(name)
        if kept is None or kept.dtype != dtype or len(kept) < size:
            self._kept.pop(name, None)  # not both at once
            kept = self._kept[name] = torch.empty(size, dtype=dtype)
        return kept[:size].view(rows, width)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values lie in the memory that is kept."""
        storage = tensor.untyped_storage().data_ptr()
        return any(kept.untyped_storage().data_ptr() == storage for kept in self._kept.values())
