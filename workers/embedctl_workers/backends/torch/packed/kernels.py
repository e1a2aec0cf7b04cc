"""The operations between the matrix products: compiled for the CPU at hand if there is a compiler, else torch's."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch.nn import functional

from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.backends.torch.packed.native import address, library
from embedctl_workers.machine.host import Host
from embedctl_workers.models.compiling import NOT_COMPILED

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Texts:
    """Where the texts of a batch lie in its matrices."""

    offsets: torch.Tensor  #: int64, one more than texts: the first row of each text, then the end of the last one
    #: int64: the texts, longest first. Threads take them in this order, so that none begins the longest last.
    order: torch.Tensor
    longest: int  #: tokens of the longest text

    @classmethod
    def at(cls, offsets: Rows) -> Self:
        """The texts that begin at these rows; `offsets` as the attribute."""
        lengths = np.diff(offsets)
        order = np.argsort(-lengths, kind="stable")
        return cls(torch.from_numpy(offsets), torch.from_numpy(order), int(lengths.max()))

    def parted(self, tokens: int) -> tuple[Self | None, Self | None]:
        """The texts of so many tokens or more, and those of fewer; None where there are none."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[self.order]
        long = int((lengths >= tokens).sum())
        parts = [(self.order[:long], lengths[:long]), (self.order[long:], lengths[long:])]
        first, second = (replace(self, order=order, longest=int(of[0])) if len(order) else None for order, of in parts)
        return first, second


class NormStruct(ctypes.Structure):
    """The C struct `norm`."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("eps", ctypes.c_float))


class Norm:
    """A LayerNorm's weight, bias and epsilon; its statistics are computed in float32, whatever the type."""

    def __init__(
        self, module: torch.nn.LayerNorm, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.weight = module.weight.detach().to(device, dtype).contiguous()
        self.bias = module.bias.detach().to(device, dtype).contiguous()
        self.eps = float(module.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    @property
    def struct(self) -> NormStruct:
        """The same for a C function; it keeps neither tensor alive."""
        return NormStruct(address(self.weight), address(self.bias), self.eps)


@dataclass(frozen=True, slots=True)
class Tables:
    """What tokens are embedded with: LayerNorm(words[id] + places[position]); float32, contiguous, a row for each."""

    words: torch.Tensor
    places: torch.Tensor
    norm: Norm


class TorchKernels:
    """Operations on contiguous float32 matrices with one row per token, in torch.

    They are the reference for the compiled kernels, and the fallback without a compiler.
    """

    #: For people.
    name = "torch kernels"

    def embed(self, ids: torch.Tensor, positions: torch.Tensor, tables: Tables, x: torch.Tensor) -> None:
        """The tables' vectors of ids and positions, int64 and within the tables, into `x`."""
        x.copy_(tables.norm(tables.words[ids] + tables.places[positions]))

    def attention(self, qkv: torch.Tensor, texts: Texts, context: torch.Tensor) -> None:
        """softmax(q kᵀ) v for each text and head, into `context`, tokens × hidden.

        `qkv` is 3 · heads × tokens × head, or a view of that shape without gaps in a head's row; queries are scaled.
        """
        for text in texts.order:
            begin, end = texts.offsets[text : text + 2].tolist()
            q, k, v = qkv[:, begin:end].view(3, -1, end - begin, qkv.shape[2])
            one = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
            context[begin:end] = one.transpose(0, 1).flatten(1)

    def add_layer_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> None:
        """LayerNorm(x + y) into `x`."""
        x.copy_(norm(x.add_(y)))

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """x · Φ(x); perhaps in place."""
        return functional.gelu(x)


class CompiledKernels:
    """The same as :class:`TorchKernels`, by the library made from `kernels.c`."""

    name = "compiled kernels"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def embed(self, ids: torch.Tensor, positions: torch.Tensor, tables: Tables, x: torch.Tensor) -> None:
        norm = tables.norm
        self._library.embed(
            *map(address, (x, ids, positions, tables.words, tables.places, norm.weight, norm.bias)),
            *map(ctypes.c_long, x.shape),
            ctypes.c_float(norm.eps),
        )

    def attention(self, qkv: torch.Tensor, texts: Texts, context: torch.Tensor) -> None:
        apart, row, _ = qkv.stride()
        failed = self._library.attention(
            address(qkv[0, 0]),
            *map(address, (context, texts.offsets, texts.order)),
            *map(ctypes.c_long, (len(texts.order), len(qkv) // 3, qkv.shape[2], texts.longest, row, apart)),
        )
        if failed:
            raise MemoryError(f"attention over a text of {texts.longest} tokens")

    def add_layer_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> None:
        self._library.add_layer_norm(
            *map(address, (x, y, norm.weight, norm.bias)), *map(ctypes.c_long, x.shape), ctypes.c_float(norm.eps)
        )

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        self._library.gelu(address(x), ctypes.c_long(x.numel()))
        return x


Kernels = TorchKernels | CompiledKernels


def load_kernels(host: Host) -> Kernels:
    """The kernels for this CPU: from the cache, or compiled into it, or else torch's, with one line in the log."""
    try:
        return CompiledKernels(library("kernels.c", host, headers=("vectors.h", "sums.h")))
    except NOT_COMPILED as error:
        log.warning("kernels are torch's own, which costs up to a third of the speed: %s", error)
        return TorchKernels()
