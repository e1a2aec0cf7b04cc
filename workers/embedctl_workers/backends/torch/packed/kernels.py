"""The operations between the matrix products: compiled for the CPU at hand if there is a compiler, else torch's."""

from __future__ import annotations

import ctypes
import logging
import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.backends.torch.packed.buffers import Matrix
from embedctl_workers.backends.torch.packed.inputs import Tables, Texts
from embedctl_workers.backends.torch.packed.native import address, library
from embedctl_workers.backends.torch.packed.weights import Part
from embedctl_workers.machine.host import Host
from embedctl_workers.models.compiling import NOT_COMPILED, digest_of

if TYPE_CHECKING:
    from embedctl_workers.backends.torch.packed.torch_kernels import TorchKernels

log = logging.getLogger(__name__)


class NormStruct(ctypes.Structure):
    """The C struct `norm`."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("eps", ctypes.c_float))


def norm_at(norm: Part) -> NormStruct:
    """A LayerNorm for a C function; it does not keep the arrays alive."""
    return NormStruct(address(norm.weight), address(norm.bias), norm.eps)


class CompiledKernels:
    """Operations on contiguous float32 matrices with one row per token: `kernels.c`."""

    #: For people.
    name = "compiled kernels"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.code = (digest_of(library),)

    def embed(self, ids: Rows, positions: Rows, tables: Tables, x: Matrix) -> None:
        """The tables' vectors of ids and positions, which are within the tables, into `x`."""
        norm = tables.norm
        self._library.embed(
            *map(address, (x, ids, positions, tables.words, tables.places, norm.weight, norm.bias)),
            *map(ctypes.c_long, x.shape),
            ctypes.c_float(norm.eps),
        )

    def attention(self, qkv: Matrix, texts: Texts, context: Matrix) -> None:
        """softmax(q kᵀ) v for each text and head, into `context`, tokens × hidden.

        `qkv` is 3 · heads × tokens × head, or a view of that shape without gaps in a head's row; queries are scaled.
        """
        values = np.asarray(qkv)
        apart, row = (step // values.itemsize for step in values.strides[:2])
        failed = self._library.attention(
            address(values[0, 0]),
            *map(address, (context, texts.offsets, texts.order)),
            *map(ctypes.c_long, (len(texts.order), len(values) // 3, values.shape[2], texts.longest, row, apart)),
        )
        if failed:
            raise MemoryError(f"attention over a text of {texts.longest} tokens")

    def add_layer_norm(self, x: Matrix, y: Matrix, norm: Part) -> None:
        """LayerNorm(x + y) into `x`."""
        self._library.add_layer_norm(
            *map(address, (x, y, norm.weight, norm.bias)), *map(ctypes.c_long, x.shape), ctypes.c_float(norm.eps)
        )

    def gelu(self, x: Matrix) -> None:
        """x · Φ(x) into `x`."""
        self._library.gelu(address(x), ctypes.c_long(math.prod(x.shape)))


Kernels: TypeAlias = "TorchKernels | CompiledKernels"


def load_kernels(host: Host) -> Kernels:
    """The kernels for this CPU: from the cache, or compiled into it, or else torch's, with one line in the log."""
    try:
        return CompiledKernels(library("kernels.c", host, headers=("vectors.h", "sums.h")))
    except NOT_COMPILED as error:
        log.warning("kernels are torch's own, which costs up to a third of the speed: %s", error)
        from embedctl_workers.backends.torch.packed.torch_kernels import TorchKernels

        return TorchKernels()
