"""What a backend is: tokenise, run the device, post-process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np

from embedctl_config.hardware import ModelEntry, Thresholds
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles

#: Lengths of the texts with which backends warm up (tokens).
_WARM_UP_LENGTHS = (8, 32, 128, 256)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a backend's vectors are measured against: torch in fp32 on these files.

    Attributes:
        bounds: those that the artefact which the backend runs states for itself; the precision's where None.
    """

    files: ModelFiles
    bounds: Thresholds | None = None


def is_out_of_memory(error: Exception) -> bool:
    """Whether a backend failed for want of memory, on the host or on its device.

    Told by names, so that no runtime is imported: `torch.OutOfMemoryError` is a RuntimeError, and torch's allocator for
    the CPU raises a bare one (c10/core/CPUAllocator.cpp). onnxruntime's errors are of many kinds that say nothing.
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in ("can't allocate memory", "Failed to allocate memory"))
    )


class Backend(Protocol):
    """A loaded model on a device.

    Calls of :meth:`forward` never overlap; :meth:`tokenize` and :meth:`finish` may run beside any other call, in
    several threads. :meth:`forward` and :meth:`finish` raise :class:`~embedctl_config.errors.DeviceLost` where the
    device is of no use any more to this process; whatever else they raise is taken to be the doing of the batch's rows.
    """

    #: Names of the options that a hardware class may set.
    OPTIONS: ClassVar[tuple[str, ...]]

    #: sha256 in hexadecimal over what decides the vectors.
    fingerprint: str
    #: Length of a vector.
    dim: int
    #: Most tokens of a text, special ones included.
    max_tokens: int
    #: What executes the model, in words for people.
    engine: str
    #: What its vectors are measured against before it is used; None: nothing is promised of them.
    reference: Reference | None
    #: How many batches may have been begun, and wait for :meth:`finish`, while the next one is begun: 0 where
    #: :meth:`forward` returns when all is done.
    ahead: int
    #: Upper bound of rows × longest row of a batch where neither the class nor `model tune` says another, in tokens.
    token_budget: int
    #: What a batch costs beside its padded rows, in tokens, for which batches are cut where that saves more padding;
    #: None where rows are not padded, or to the sizes of buckets.
    batch_cost: int | None

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        """Load a model.

        Raises:
            ModelError: it can't be found, or is of a kind that this backend does not support.
        """
        ...

    def tokenize(self, texts: Sequence[str], prompt: str | None) -> Tokens:
        """Pre-process: tokenise texts with a prompt before each; None means the model's own default prompt."""
        ...

    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        """Core: run the device on some of the texts. What comes back is for :meth:`finish` alone.

        It may return before the device is done.
        """
        ...

    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        """Post-process: wait for the device; float32, rows × dim, in host memory; of unit length if `normalize`."""
        ...

    def positions(self, lengths: Rows) -> int:
        """How many tokens the device computes for a batch of these lengths, padding included: their sum or more."""
        ...

    def warm_up(self) -> None:
        """Do whatever makes the first real batch slower than the next."""
        ...

    def close(self) -> None:
        """Give back the device's memory."""
        ...


def run_warm_up_batches(backend: Backend) -> None:
    """Run one small batch for each of several usual lengths."""
    for length in _WARM_UP_LENGTHS:
        tokens = backend.tokenize(["a " * min(length, backend.max_tokens)], "")
        backend.finish(backend.forward(tokens, np.zeros(2, np.int64)), normalize=True)


@runtime_checkable
class RemembersBudget(Protocol):
    """A backend whose next start begins with the token budget that this one was brought down to."""

    def remember_budget(self, tokens: int) -> None:
        """Keep it: the device ran out of memory with a larger one."""
        ...
