"""The operations between the matrix products: compiled for the CPU at hand if there is a compiler, else torch's."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch.nn import functional

from embedctl_workers.machine.host import Host
from embedctl_workers.models.compiling import NOT_COMPILED, compiled

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC")
_OPENMP = re.compile(r"\S*/lib[gi]?omp[^/\s]*\.so\S*")


class Kernels(Protocol):
    """Operations on contiguous float32 matrices with one row per token.

    `offsets` is int64: the begin of each text, then the end of the last one.

    Attributes:
        name: for people.
    """

    name: str

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, places: torch.Tensor, norm: Norm
    ) -> torch.Tensor:
        """LayerNorm(words[ids] + places[positions]); ids and positions are int64 and must be within their tables."""
        ...

    def attention(self, qkv: torch.Tensor, offsets: torch.Tensor, heads: int, context: torch.Tensor) -> None:
        """softmax(q kᵀ) v for each text and head, into `context`; `qkv` is tokens × (3 · hidden), queries scaled."""
        ...

    def add_layer_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> None:
        """LayerNorm(x + y) into `x`."""
        ...

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """x · Φ(x); perhaps in place."""
        ...


class Norm:
    """A LayerNorm's weight, bias and epsilon."""

    def __init__(self, module: torch.nn.LayerNorm) -> None:
        self.weight = module.weight.detach().float().contiguous()
        self.bias = module.bias.detach().float().contiguous()
        self.eps = float(module.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class TorchKernels:
    """The operations in torch: the reference for the compiled kernels, and the fallback without a compiler."""

    name = "torch kernels"

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, places: torch.Tensor, norm: Norm
    ) -> torch.Tensor:
        return norm(words[ids] + places[positions])

    def attention(self, qkv: torch.Tensor, offsets: torch.Tensor, heads: int, context: torch.Tensor) -> None:
        hidden = context.shape[1]
        at = offsets.tolist()
        for begin, end in pairwise(at):
            q, k, v = qkv[begin:end].view(end - begin, 3, heads, hidden // heads).permute(1, 2, 0, 3)
            one = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
            context[begin:end] = one.transpose(0, 1).reshape(end - begin, hidden)

    def add_layer_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> None:
        x.copy_(norm(x.add_(y)))

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)


class CompiledKernels:
    """Calls into the shared object made from `kernels.c`.

    Args:
        library: the path of the shared object.

    Raises:
        OSError: the library can't be loaded.
    """

    name = "compiled kernels"

    def __init__(self, library: Path) -> None:
        # The library is linked without OpenMP, because two of its runtimes in one process compete for the CPUs. This
        # loads torch's.
        for path in sorted(set(_OPENMP.findall(Path("/proc/self/maps").read_text()))):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library), mode=os.RTLD_NOW)

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, places: torch.Tensor, norm: Norm
    ) -> torch.Tensor:
        tokens, width = len(ids), words.shape[1]
        x = torch.empty(tokens, width)
        self._library.embed(
            *map(_at, (x, ids, positions, words, places, norm.weight, norm.bias)),
            ctypes.c_long(tokens),
            ctypes.c_long(width),
            ctypes.c_float(norm.eps),
        )
        return x

    def attention(self, qkv: torch.Tensor, offsets: torch.Tensor, heads: int, context: torch.Tensor) -> None:
        longest = int((offsets[1:] - offsets[:-1]).max())
        failed = self._library.attention(
            *map(_at, (qkv, context, offsets)),
            *map(ctypes.c_long, (len(offsets) - 1, heads, context.shape[1] // heads, longest)),
        )
        if failed:
            raise MemoryError(f"attention over a text of {longest} tokens")

    def add_layer_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> None:
        self._library.add_layer_norm(
            *map(_at, (x, y, norm.weight, norm.bias)), *map(ctypes.c_long, x.shape), ctypes.c_float(norm.eps)
        )

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        self._library.gelu(_at(x), ctypes.c_long(x.numel()))
        return x


def load_kernels(host: Host) -> Kernels:
    """The kernels for this CPU: from the cache, or compiled into it, or else torch's, with one line in the log."""
    source = files("embedctl_workers.backends.torch.packed") / "kernels.c"
    try:
        return compiled(source, _FLAGS, host, CompiledKernels)
    except NOT_COMPILED as error:
        log.warning("kernels are torch's own, at about half the speed: %s", error)
        return TorchKernels()


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    if not tensor.is_contiguous():
        raise ValueError("a kernel takes only contiguous tensors")
    return ctypes.c_void_p(tensor.data_ptr())
