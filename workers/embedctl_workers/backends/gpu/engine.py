"""What runs a batch on the device, between the copies to it and from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from embedctl_workers.arrays.tokens import Rows, Tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch before it is copied to the device.

    Attributes:
        arrays: of integers, by name: what is copied.
        facts: what the engine knows of the batch besides, for itself.
    """

    arrays: Mapping[str, np.ndarray[Any, Any]]
    facts: Any


class GpuEngine(Protocol):
    """A model's layers and what makes a text's vector of its tokens', on the device.

    Attributes:
        name: for people.
    """

    name: str

    def batch(self, tokens: Tokens, rows: Rows) -> Batch:
        """Some of the texts, made ready on the host.

        Raises:
            IndexError: a token or a position that the model has no embedding for.
        """
        ...

    def run(self, inputs: Mapping[str, torch.Tensor], facts: Any) -> torch.Tensor:
        """Vectors, float32, rows × dim, on the device; not normalised unless the model itself does so.

        Args:
            inputs: the batch's arrays, int32, on the device.
        """
        ...

    def positions(self, lengths: Rows) -> int:
        """How many tokens are computed for texts of these lengths, padding included."""
        ...
