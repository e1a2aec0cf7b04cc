"""What a backend is: tokenise, run the device, post-process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from embedctl_config.hardware import ModelEntry

Rows = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokenised texts, unpadded.

    Attributes:
        lengths: int64, one a text: tokens that will be encoded, special ones included.
        lost: int64, one a text: tokens cut off at the model's maximum length.
        columns: the model's inputs by name, each one list of ints a text.
        prompt_tokens: how many of each text's first tokens are the prompt, where pooling must leave them out.
    """

    lengths: Rows
    lost: Rows
    columns: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """What a backend may use of this machine.

    Attributes:
        threads: compute threads; the process is pinned already.
        cache: the folder that keeps what was built for this machine.
        build: whether to build what is not in the cache, or to refuse.
    """

    threads: int
    cache: Path
    build: bool = True


def is_out_of_memory(error: Exception) -> bool:
    """Whether a backend failed for want of memory, on the host or on its device.

    Told by names, so that no runtime is imported: `torch.OutOfMemoryError` is a RuntimeError, and torch's allocator for
    the CPU raises a bare one (c10/core/CPUAllocator.cpp).
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


class Backend(Protocol):
    """A loaded model on a device. :meth:`tokenize` may run beside :meth:`forward`; forwards never overlap."""

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
        """Core: run the device on some of the texts. What comes back is for :meth:`finish` alone."""
        ...

    def finish(self, output: Any, *, normalize: bool) -> Vectors:
        """Post-process: float32, rows × dim, in host memory; of unit length if `normalize`."""
        ...

    def warm_up(self) -> None:
        """Do whatever makes the first real batch slower than the next."""
        ...

    def close(self) -> None:
        """Give back the device's memory."""
        ...
