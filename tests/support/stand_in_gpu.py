"""The CPU in place of a GPU. It computes the same at once, and is strict about work that a GPU would finish later.

Tests on it show that vectors are right, and that an event orders every copy and every use. They show nothing about a
GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from embedctl_workers.backends.gpu.device import Gpu, Peak


class StandInStream:
    """A stream that records the events that it has waited for."""

    def __init__(self) -> None:
        self.waited: list[StandInEvent] = []

    def wait_event(self, event: StandInEvent) -> None:
        assert event.stream not in (None, self), "waits for an event that no other stream has recorded"
        self.waited.append(event)


class StandInEvent:
    """An event. The stream in use must record it before anything waits for it."""

    def __init__(self, device: StandIn) -> None:
        self._device = device
        self.stream: StandInStream | None = None

    def record(self, stream: StandInStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None, "waits for an event that was not recorded"
        self._device.waits += 1
        if self._device.fails_late is not None:
            raise self._device.fails_late


class StandIn(Gpu):
    """A GPU that is the CPU.

    Attributes:
        waits: how often the host waited for an event.
        kept: streams that tensors were kept for.
        fails_late: what waiting for an event raises.
        broken: whether nothing can be computed any more.
        emptied: how often memory was given back.
        free: bytes that are said to be free.
        peak: bytes that a sample batch is said to take.
        sharing: how many workers it was opened for.
    """

    device = torch.device("cpu")
    name = "the CPU as a stand-in"
    memory = 1 << 30

    def __init__(self, sharing: int = 1, *, varlen: bool = False) -> None:
        self.sharing = sharing
        self.dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
        self.varlen = varlen
        self.waits = 0
        self.kept: list[StandInStream] = []
        self.fails_late: Exception | None = None
        self.broken = False
        self.emptied = 0
        self.free = 1 << 40
        self.peak = 0
        self._on = threading.local()

    @property
    def current(self) -> StandInStream | None:
        """The stream that queues this thread's work; None for the device's default stream."""
        return getattr(self._on, "stream", None)

    def stream(self) -> StandInStream:
        return StandInStream()

    def event(self) -> StandInEvent:
        return StandInEvent(self)

    @contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        before, self._on.stream = self.current, stream
        yield
        self._on.stream = before

    def keep_for(self, stream: StandInStream, tensor: torch.Tensor) -> None:
        self.kept.append(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Simulates memory that was used before, so that a read of unwritten memory shows.
        return torch.full(shape, -(2**31) if dtype == torch.int32 else torch.nan, dtype=dtype)

    def free_memory(self) -> int:
        return self.free

    @contextmanager
    def peak_of(self) -> Iterator[Peak]:
        peak = Peak()
        yield peak
        peak.bytes = self.peak

    def synchronize(self) -> None:
        if self.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def empty_cache(self) -> None:
        self.emptied += 1


_WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "repeat_interleave.self_Tensor", "masked_select", "unique")


def waits(operation: Any, args: Any) -> bool:
    """Whether an operation would wait for a GPU, because the host needs a value or a size from it."""
    name = str(operation)
    by_mask = name.startswith("aten.index.") and any(each is not None and each.dtype == torch.bool for each in args[1])
    return by_mask or any(word in name for word in _WAITING)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes operations that would wait for a GPU, because the host needs a value or a size from it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(operation, args):
            self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
) -> torch.Tensor:
    """The same as torch's function of this name. As there, a text's rows beyond `max_q` are left unchanged."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.stride(-1) == 1
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    at: list[Any] = cu_seq_q.tolist()
    for begin, end in pairwise(at):
        last = min(end, begin + max_q)
        q, k, v = (part[begin:last].transpose(0, 1) for part in (query, key, value))
        out[begin:last] = scaled_dot_product_attention(q, k, v).transpose(0, 1)
    return out
