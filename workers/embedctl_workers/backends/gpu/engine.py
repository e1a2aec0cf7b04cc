"""The protocol of an engine: it runs a batch on the device, between the copies to and from it."""

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
        arrays: the integer arrays to copy, by name.
        facts: what else the engine needs to know of the batch; private to the engine.
    """

    arrays: Mapping[str, np.ndarray[Any, Any]]
    facts: Any


class GpuEngine(Protocol):
    """A model on the device: its layers, and the modules that turn tokens' vectors into a text's vector.

    Attributes:
        name: for people.
    """

    name: str

    def batch(self, tokens: Tokens, rows: Rows) -> Batch:
        """Prepare some of the texts on the host.

        Raises:
            IndexError: the model has no embedding for a token or a position.
        """
        ...

    def run(self, inputs: Mapping[str, torch.Tensor], facts: Any) -> torch.Tensor:
        """Vectors, float32, rows × dim, on the device; not normalised unless the model itself does so.

        Args:
            inputs: the batch's arrays, int32, on the device.
        """
        ...

    def widened(self) -> GpuEngine:
        """The same in float32, made of the weights on the device; it is to be dropped soon."""
        ...

    def positions(self, lengths: Rows) -> int:
        """The number of tokens that are computed for texts of these lengths, padding included."""
        ...
