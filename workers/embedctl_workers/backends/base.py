"""The protocol of a backend: tokenise, run the device, post-process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np

from embedctl_config.hardware import ModelEntry, Thresholds
from embedctl_config.outputs import PLAIN, Output
from embedctl_workers.arrays.tokens import Found, Rows, Side, Tokens, padded
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET

#: Lengths of the texts with which backends warm up (tokens).
_WARM_UP_LENGTHS = (8, 32, 128, 256)


@dataclass(frozen=True, slots=True)
class Reference:
    """Torch in fp32 on these files; a backend or artefact may state `bounds` for itself, None: the precision's."""

    files: ModelFiles
    bounds: Thresholds | None = None


def is_out_of_memory(error: Exception) -> bool:
    """Whether a backend failed because memory ran out, on the host or on its device.

    The check goes by names and messages, so that no runtime is imported. `torch.OutOfMemoryError` is a RuntimeError,
    and torch's allocator for the CPU raises a bare RuntimeError (c10/core/CPUAllocator.cpp). onnxruntime raises errors
    of many types, which do not tell the cause.
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in ("can't allocate memory", "Failed to allocate memory"))
    )


class Backend(Protocol):
    """A loaded model on a device.

    Calls of :meth:`forward` never overlap. :meth:`tokenize` and :meth:`finish` may run at the same time as any other
    call, in several threads. :meth:`forward` and :meth:`finish` raise :class:`~embedctl_config.errors.DeviceLost` if
    this process can no longer use the device. Any other error of theirs is blamed on the rows of the batch.
    """

    #: Names of the options that a hardware class may set.
    OPTIONS: ClassVar[tuple[str, ...]]

    #: sha256 in hexadecimal over everything that determines the vectors.
    fingerprint: str
    #: Number of dimensions of a dense vector; 0 if the model gives none.
    dim: int
    #: What the model gives of a text, in their order.
    outputs: tuple[Output, ...] = PLAIN
    #: The size of the vocabulary of sparse vectors, and the dimensions of each vector of a multi-vector.
    widths: Mapping[Output, int] = MappingProxyType({})
    #: Prompts by name that the model has beside those of its configuration.
    own_prompts: Mapping[str, str] = MappingProxyType({})
    #: Most tokens of a text, special ones included.
    max_tokens: int
    #: The software that executes the model, in words for people.
    engine: str
    #: Where the engine was chosen by its speed: what it was compared with, and how it fared, in words for people.
    chosen: str = ""
    #: The gate compares the vectors with this reference before the backend is used; None: nothing is promised of them.
    reference: Reference | None = None
    #: How many batches may wait for :meth:`finish` while the next one is begun; 0 if :meth:`forward` returns only when
    #: the batch is done.
    ahead: int = 0
    #: Default upper bound of a batch's size in tokens; the class may set another.
    token_budget: int = DEFAULT_TOKEN_BUDGET
    #: The cost of a batch in addition to its padded rows, in tokens: batches are cut where that saves more padding than
    #: it costs. None if rows are not padded, or are padded to the sizes of buckets.
    batch_cost: int | None = None
    #: Whether a batch's size is the sum of its rows, because none is padded; otherwise it is rows × longest row.
    budget_by_sum: bool = False
    #: Whether batches of several chunks may be joined into one, up to the token budget. The batches are then begun by
    #: one thread and finished by another.
    joins: bool = False

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        """Load a model; a ModelError if it can't be found, or is of a kind that this backend does not support."""

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        """Pre-process: tokenise texts with a prompt before each; None means the model's own default prompt.

        They are to have dense vectors, or all outputs of a model that gives none.

        A text that is too long loses its end on `truncation_side`; None: as the model's tokenizer says.
        """

    def forward(self, tokens: Tokens, rows: Rows) -> Any:
        """Core: run the device on some of the texts, perhaps not to the end. Only :meth:`finish` knows the result."""

    def finish(self, output: Any, *, normalize: bool) -> Found:
        """Post-process: wait for the device; vectors, float32, rows × dim, on the host, of length 1 if `normalize`.

        If the tokens are to have other outputs than these alone: cells, rows × outputs, in which the vectors of the
        tokens have length 1 too.
        """

    def positions(self, lengths: Rows) -> int:
        """How many tokens the device computes for a batch of these lengths, padding included: their sum or more."""
        return padded(lengths)

    def warm_up(self) -> None:
        """Do all one-time work that would make the first real batch slower than the next."""
        run_warm_up_batches(self)

    def close(self) -> None:
        """Release the device's memory."""


def run_warm_up_batches(backend: Backend, lengths: Sequence[int] = _WARM_UP_LENGTHS) -> None:
    for length in lengths:
        tokens = backend.tokenize(["a " * min(length, backend.max_tokens)], "")
        backend.finish(backend.forward(tokens, np.zeros(2, np.int64)), normalize=True)


@runtime_checkable
class WarmsThreads(Protocol):
    """A backend with one-time work in each thread that calls it."""

    def warm_up_thread(self) -> None:
        """Do that work in this thread. No other thread may call :meth:`Backend.forward` meanwhile."""


@runtime_checkable
class Widens(Protocol):
    """A backend that computes in a type of small range, and can compute in one of larger range at times."""

    def forward_wider(self, tokens: Tokens, rows: Rows) -> Any:
        """As :meth:`Backend.forward`, in the type of larger range: slower, and for few rows."""
