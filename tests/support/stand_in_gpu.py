"""The CPU in place of a GPU. It computes the same at once, and is strict about work that a GPU would finish later.

Tests on it show that vectors are right, and that an event orders every copy and every use. They show nothing about a
GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from embedctl_workers.backends.gpu.device import Gpu, Peak
from tests.support.stand_in_graph import StandInGraph, waits


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
        captured: how many graphs were captured.
        refuses: what the next captures raise, one after the other.
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
        self.captured = 0
        self.refuses: list[Exception] = []
        self._on = threading.local()

    @property
    def current(self) -> StandInStream | None:
        """The stream that queues this thread's work; None for the device's default stream."""
        return getattr(self._on, "stream", None)

    def stream(self) -> StandInStream:
        self._refuse_in_capture()
        return StandInStream()

    def event(self) -> StandInEvent:
        self._refuse_in_capture()
        return StandInEvent(self)

    @contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        before, self._on.stream = self.current, stream
        yield
        self._on.stream = before

    def keep_for(self, stream: StandInStream, tensor: torch.Tensor) -> None:
        self._refuse_in_capture()
        self.kept.append(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._refuse_in_capture()
        # Simulates memory that was used before, so that a read of unwritten memory shows.
        return torch.full(shape, -(2**31) if dtype == torch.int32 else torch.nan, dtype=dtype)

    def free_memory(self) -> int:
        return self.free

    @contextmanager
    def peak_of(self) -> Iterator[Peak]:
        peak = Peak()
        yield peak
        peak.bytes = self.peak

    def capture(self, work: Callable[[], object], beside: StandInGraph | None) -> StandInGraph:
        self._refuse_in_capture()
        assert self.current is not None, "captures on the default stream"
        self._on.capturing = True
        try:
            graph = StandInGraph(work, beside)
        finally:
            self._on.capturing = False
        if self.refuses:
            raise self.refuses.pop(0)
        self.captured += 1
        return graph

    def _refuse_in_capture(self) -> None:
        assert not getattr(self._on, "capturing", False), "would end the capture that this thread has begun"

    def synchronize(self) -> None:
        self._refuse_in_capture()
        if self.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def empty_cache(self) -> None:
        self._refuse_in_capture()
        self.emptied += 1


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
    """Compute the same as torch's function of this name, also in one operator. As in torch, a text's rows beyond
    `max_q` are left unchanged."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.stride(-1) == 1
    found: torch.Tensor = _attend(query, key, value, cu_seq_q, max_q)
    return found


@torch.library.custom_op("embedctl_tests::varlen_attn", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq: torch.Tensor, longest: int
) -> torch.Tensor:
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    at: list[Any] = cu_seq.tolist()
    for begin, end in pairwise(at):
        last = min(end, begin + longest)
        q, k, v = (part[begin:last].transpose(0, 1) for part in (query, key, value))
        if end > begin:
            out[begin:last] = scaled_dot_product_attention(q, k, v).transpose(0, 1)
    return out


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq: torch.Tensor, longest: int) -> torch.Tensor:
    return query.new_empty(query.shape)
