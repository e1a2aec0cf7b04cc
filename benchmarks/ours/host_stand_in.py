"""A backend that stands in for a GPU: all of the GPU backend's work on the host, and a device that only takes time.

The device is a clock. A batch begins when the one before it has ended, and takes a given time per token; waiting for
it is a sleep, so meanwhile nobody holds the GIL. A thread that played the device would take the GIL at the end of each
batch, which a GPU does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from benchmarks.ours.host_stand_in_vectors import Tables, TorchTables

from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Side, Tokens
from embedctl_workers.backends.base import Reference
from embedctl_workers.backends.gpu.attention import Varlen
from embedctl_workers.backends.gpu.backend import TorchGpuBackend
from embedctl_workers.backends.gpu.device import Gpu, Peak
from embedctl_workers.backends.gpu.packed import PackedGpuEngine
from embedctl_workers.backends.torch.packed.inputs import packable
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, resolve_model

#: A launch is an operation on this many elements, which takes about as many nanoseconds on one CPU: what beginning a
#: small operation on a GPU costs the host, and what a call of attention over packed texts does. One launch of sixteen
#: is attention.
_SMALL, _ATTENTION, _ATTENTION_EVERY = 4_000, 100_000, 16


class StandInStream:
    """A queue of work.

    Attributes:
        until: when all of it is done, by the monotonic clock (seconds).
    """

    until = 0.0

    def wait_event(self, event: StandInEvent) -> None:
        self.until = max(self.until, event.at)


class StandInEvent:
    """A point in a stream's work.

    Attributes:
        at: when it is reached, by the monotonic clock (seconds).
    """

    at = 0.0

    def record(self, stream: StandInStream) -> None:
        self.at = stream.until

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))


class StandInDevice(Gpu):
    """A GPU that takes time, and computes nothing.

    Args:
        ns_per_token: how long it takes for a token (nanoseconds).
    """

    device = torch.device("cpu")
    name = "a stand-in for a GPU"
    memory = 1 << 40
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    varlen = False

    def __init__(self, ns_per_token: float) -> None:
        self._s_per_token = ns_per_token / 1e9
        self._current = StandInStream()

    def compute(self, tokens: int) -> None:
        """Queue a batch of so many tokens on the current stream."""
        stream = self._current
        stream.until = max(stream.until, time.monotonic()) + tokens * self._s_per_token

    def stream(self) -> StandInStream:
        return StandInStream()

    def event(self) -> StandInEvent:
        return StandInEvent()

    @contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        before, self._current = self._current, stream  # one for all threads: batches are begun by one at a time
        yield
        self._current = before

    def keep_for(self, stream: StandInStream, tensor: torch.Tensor) -> None:
        pass

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, work: Callable[[], object], beside: Any) -> Any:
        raise RuntimeError("a stand-in captures no graphs")

    def free_memory(self) -> int:
        return self.memory

    @contextmanager
    def peak_of(self) -> Iterator[Peak]:
        yield Peak()

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class StandInEngine(PackedGpuEngine):
    """Prepares batches as for a GPU. Running one costs the host some launches, and the device its time.

    Args:
        launches: operations that a batch begins.
    """

    def __init__(self, *arguments: Any, gpu: StandInDevice, launches: int) -> None:
        super().__init__(*arguments)
        # The attention of a GPU: it is planned on the host in no time, and never called here.
        self._attention = Varlen(None)
        self._gpu = gpu
        sizes = [_SMALL if number % _ATTENTION_EVERY else _ATTENTION for number in range(1, launches + 1)]
        self._work = [torch.ones(size) for size in sizes]
        self._into = torch.empty(_ATTENTION)
        words = self._weights.words
        self._vectors = TorchTables(Tables.of(*words.shape))
        self.name = f"stand-in, {launches} launches a batch"

    def run(self, inputs: Mapping[str, torch.Tensor], facts: Any) -> torch.Tensor:
        for values in self._work:
            torch.cumsum(values, 0, out=self._into[: len(values)])
        self._gpu.compute(len(inputs["ids"]))
        vectors: torch.Tensor = self._vectors(inputs["ids"], inputs["places"], inputs["cu_seq_lens"])
        return vectors


class StandInBackend(TorchGpuBackend):
    """The GPU backend on a stand-in for a GPU.

    Options:
        ns_per_token: how long the device takes for a token (nanoseconds).
        launches: operations that a batch begins on the device.
        cached: whether texts are tokenised only when they come for the first time, chunk by chunk.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("ns_per_token", "launches", "cached")

    def __init__(
        self, files: ModelFiles, host: Host, *, ns_per_token: float = 0.0, launches: int = 100, cached: bool = False
    ) -> None:
        self._launches = launches
        self._stand_in = StandInDevice(ns_per_token)
        self._cache: dict[tuple[object, ...], Tokens] | None = {} if cached else None
        super().__init__(files, host, self._stand_in, dtype="fp16")
        torch.set_num_threads(1)  # what stands in for kernels must not wait for a second CPU
        self.reference: Reference | None = None  # its vectors mean nothing

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        return cls(resolve_model(model, entry), host, **options)

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        if self._cache is None or truncation_side is not None:
            return super().tokenize(texts, prompt, truncation_side)
        # The texts of the benchmark always come in the same order, so these three tell its chunks apart.
        key = (len(texts), texts[0], texts[-1])
        if key not in self._cache:
            self._cache[key] = super().tokenize(texts, prompt)
        return self._cache[key]

    def _engine_in(self, dtype: torch.dtype) -> StandInEngine:
        found = packable(self._model)
        assert found is not None, "the benchmark's model is one of the BERT family"
        return StandInEngine(
            *found, self._stand_in, dtype, self.max_tokens, gpu=self._stand_in, launches=self._launches
        )
