"""The one GPU that a process sees, through torch; how much of its memory batches may take; and the messages about a GPU
that can't be used."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from embedctl_config.errors import DeviceLost, SettingsError, WorkerError
from embedctl_workers.backends.base import is_out_of_memory
from embedctl_workers.machine.devices import HIP_VARIABLES, ROCM_VARIABLE
from embedctl_workers.redaction import first_line

#: Most tokens of a batch of any model.
MOST_TOKENS = 131_072
#: Most tokens of a batch of a packed model with larger vectors, and of a padded batch: more make a GPU no faster.
_MOST_LARGE, _MOST_PADDED = 65_536, 32_768
#: The most dimensions of a small model. A batch of it is done before the next one is begun, unless it is large.
_SMALL = 512
#: Tokens of the batch whose memory is measured.
SAMPLE_TOKENS = 4_096
#: The share of the free memory that a batch may take.
_SHARE = 0.8
#: What a process holds on a device besides torch's tensors, in bytes: the driver's context and the libraries' code. An
#: estimate, for it is not verified on hardware.
CONTEXT_BYTES = 512 << 20
#: Words in errors of the device and its libraries. `torch.AcceleratorError` is recognised by its type.
_OF_THE_DEVICE = ("CUDA error", "HIP error", "CUBLAS_STATUS", "HIPBLAS_STATUS", "cuDNN error", "MIOpen")
#: Words in errors of the driver or a library that got no memory: they differ from torch's.
_NO_MEMORY = ("error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "HIPBLAS_STATUS_ALLOC_FAILED")


def part_of(total: int, workers: int) -> int:
    """Bytes of a device's `total` that torch may take in each of the workers that share it; a SettingsError if none.

    A part of the total memory, not of the free memory: so it is the same for the worker that loads first, for the one
    that loads last, and for one that is restarted while the others hold their parts.
    """
    if workers == 1:
        return total
    part = total // workers - CONTEXT_BYTES
    if part <= 0:
        raise SettingsError(
            f"{workers} workers can't share a GPU of {total / 1e9:.1f} GB, because each takes "
            f"{CONTEXT_BYTES / 1e9:.1f} GB before it loads a model: set a lower workers_per_device or --gpu-workers"
        )
    return part


def most_tokens(dim: int, *, packed: bool, logits: bool = False) -> int:
    """The most tokens of a batch that a model with vectors of `dim` dimensions profits from; or with the `logits` of
    all words for each text, or for each token if it is padded."""
    if logits:
        return SAMPLE_TOKENS
    if not packed:
        return _MOST_PADDED
    return MOST_TOKENS if dim <= _SMALL else _MOST_LARGE


def affordable(peak: int, tokens: int, free: int, most: int) -> int:
    """The most tokens of a batch, up to `most`, if a batch of `tokens` took `peak` bytes and `free` bytes are free."""
    if peak <= 0:
        return most
    return max(1, min(most, int(_SHARE * free * tokens / peak)))


class Stream(Protocol):
    """A queue of work on the device."""

    def wait_event(self, event: Any) -> None:
        """Hold back the work that is queued after this call until the event has happened."""


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: Any) -> None:
        """Mark the end of the work that is queued on a stream so far."""

    def synchronize(self) -> None:
        """Wait until that work is done."""


class Peak:
    """The peak memory of a block, in bytes; known when the block has ended."""

    bytes: int = 0


class Gpu:
    """The first device of `torch.cuda`: what the engines use of it, in addition to tensors on it.

    Args:
        sharing: how many workers share it, this one included. torch then takes no more memory than this worker's part,
            so a batch that is too large fails here, and not in another worker. A SettingsError if the memory is too
            small for so many.
    """

    def __init__(self, sharing: int = 1) -> None:
        facts = torch.cuda.get_device_properties(0)
        self.device = torch.device("cuda", 0)
        self.name = str(facts.name)
        self.memory = int(facts.total_memory)  #: its total memory in bytes
        self._part = part_of(self.memory, sharing)
        if sharing > 1:
            torch.cuda.set_per_process_memory_fraction(self._part / self.memory, self.device)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        #: the 16-bit types that it computes in, the more exact one first
        self.dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16) if bf16 else (torch.float16,)
        # FlashAttention needs compute capability 8.0. On an AMD GPU, a trial shows whether it works.
        #: whether torch's attention over packed texts may be tried on it
        self.varlen = torch.version.hip is not None or facts.major >= 8

    def stream(self) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch has no types for it

    def event(self) -> Event:
        # Blocking: a thread that waits leaves the CPU to the tokenisers.
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as above

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """A context: work that is begun inside it is queued on this stream."""
        return torch.cuda.stream(stream)

    def keep_for(self, stream: Any, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from reuse until this stream is done with the tensor."""
        tensor.record_stream(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned host memory, which the device copies without the CPU. It may be dropped while a copy is under way."""
        # torch caches pinned blocks, and reuses one only when the copies from and to it are done.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def free_memory(self) -> int:
        """Bytes that this process may still take."""
        free, _ = torch.cuda.mem_get_info(self.device)
        taken = torch.cuda.memory_allocated(self.device)
        held = torch.cuda.memory_reserved(self.device) - taken
        return min(int(free) + held, self._part - taken)

    @contextmanager
    def peak_of(self) -> Iterator[Peak]:
        """A context that measures the peak memory of the work inside it, above what was held before."""
        peak = Peak()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield peak
        self.synchronize()
        peak.bytes = torch.cuda.max_memory_allocated(self.device) - before

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


def open_gpu(sharing: int = 1) -> Gpu:
    """Open the GPU that this process sees, and try it out. `sharing` as for :class:`Gpu`.

    If torch has no support for GPUs, sees none, or sees one that does not compute, that is a WorkerError.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        raise WorkerError(
            f"torch {torch.__version__} was built without CUDA: pip install --force-reinstall with the line that "
            "PyTorch's own site gives for your CUDA or ROCm (docs/gpu.md)"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # as above
        gpu = Gpu(sharing)
        _try_out(gpu.device)
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        raise WorkerError(_unusable(first_line(error))) from error
    return gpu


def _unusable(reason: str) -> str:
    version = f"torch {torch.__version__} (" + (
        f"ROCm {torch.version.hip})" if torch.version.hip else f"CUDA {torch.version.cuda})"
    )
    if "too old" in reason or "driver version is insufficient" in reason:
        return (
            f"the GPU's driver is too old for {version}: update the driver, or install a torch that was built for an "
            f"older one (docs/gpu.md). Its error: {reason}"
        )
    if "no kernel image" in reason or "invalid device function" in reason:
        return (
            f"{version} holds no code for this GPU: install a torch that was built for it (docs/gpu.md). Its error: "
            f"{reason}"
        )
    tool = "amd-smi list" if torch.version.hip else "nvidia-smi"
    hidden = [f"{name}={os.environ[name]}" for name in (ROCM_VARIABLE, *HIP_VARIABLES) if name in os.environ]
    seen = f", and {' and '.join(hidden)} is set" if hidden else ""
    return f"{version} can use no GPU: `{tool}` shows the driver's GPUs{seen}. Its error: {reason}"


def _try_out(device: torch.device) -> None:
    """Run a small computation, wait for it, and check the result."""
    found = torch.ones(8, device=device).add_(1).sum().item()
    if found != 16:
        raise RuntimeError(f"the device computes 8 × (1 + 1) = {found}")


@contextmanager
def watched(device: Gpu) -> Iterator[None]:
    """Classify errors of the device: a lack of memory is torch.OutOfMemoryError, and what the work took is released;
    DeviceLost says that the device no longer computes.

    The caller should hold no tensors itself: the tensors of the frames below are dropped before memory is released.
    """
    try:
        yield
    except RuntimeError as error:
        lacks = any(words in str(error) for words in _NO_MEMORY)
        if lacks or is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)
            device.empty_cache()
            if lacks:
                raise torch.OutOfMemoryError(first_line(error)) from error
            raise
        if isinstance(error, torch.AcceleratorError) or any(words in str(error) for words in _OF_THE_DEVICE):
            _raise_if_lost(device, error)
        raise


def _raise_if_lost(device: Gpu, error: RuntimeError) -> None:
    """Raise DeviceLost if the device no longer computes: after most CUDA errors, nothing else works in the process."""
    try:
        device.synchronize()
        _try_out(device.device)
    except RuntimeError as again:
        raise DeviceLost(
            f"{device.name} is lost to this process: {first_line(error)}; a trivial operation fails as well: "
            f"{first_line(again)}"
        ) from error
