"""Layers whose products are our own, each with what follows it in one pass: in float32, or in int8."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from embedctl_config.cpu import cpu_flags
from embedctl_workers.backends.torch.packed.buffers import Array, Buffers, Matrix, empty
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.backends.torch.packed.kernels import Kernels, norm_at
from embedctl_workers.backends.torch.packed.layers import LayerKind, joined_qkv
from embedctl_workers.backends.torch.packed.native import address, library
from embedctl_workers.backends.torch.packed.weights import Floats, Layer, Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.machine.teams import threads
from embedctl_workers.models.compiling import digest_of

#: Inputs and outputs of a product, and a head's columns, are multiples of this; in int8, a head has at most so many.
_MULTIPLE, _MOST_HEAD = 16, 256
_HEADERS = ("vectors.h", "sums.h")
#: Instructions that sum products of bytes in 32 bits.
VNNI = frozenset({"avx512_vnni", "avx_vnni"})


class FusedLibrary(ABC):
    """Calls into a library made from `layers.c`; raises as :func:`library`.

    Activations are float32 with one row per token.
    """

    def __init__(self, host: Host, flags: Sequence[str]) -> None:
        self._products = library("layers.c", host, flags=flags, headers=_HEADERS)
        self._products.fused_scratch.restype = ctypes.c_long
        self.code: tuple[str, ...] = (digest_of(self._products),)
        #: How many outputs of a weight lie together; the greatest magnitude of a weight in bytes, and 0 for float32.
        self.panel, self.most_byte = (
            ctypes.c_long.in_dll(self._products, name).value for name in ("fused_panel", "fused_most_byte")
        )

    def linear(self, x: Matrix, product: Product, y: Matrix, buffers: Buffers) -> Matrix:
        """x · Wᵀ + b into `y`, which is returned; ValueError if `x` or `y` has another size than the product's.

        `y` is tokens × outputs; or parts × tokens × width, each part with `width` of the outputs, a multiple of 16.
        """
        if x.shape[1] != product.c.inputs or math.prod(y.shape) != len(x) * product.c.outputs:
            raise ValueError(f"a product of {product.c.inputs} × {product.c.outputs} from {x.shape} into {y.shape}")
        size = self._products.fused_scratch(*map(ctypes.c_long, (product.c.inputs, product.c.inputs)))
        self._products.fused_linear(
            address(x),
            ctypes.byref(product.c),
            address(y),
            *map(ctypes.c_long, (y.shape[-1], len(x))),
            *self._scratch(buffers, size),
        )
        return y

    def attend(self, x: Matrix, qkv: Product, texts: Texts, heads: int, buffers: Buffers) -> Array:
        """What attention makes of `x`, tokens × hidden, by the joined product of queries (scaled), keys and values."""
        tokens, hidden = x.shape
        apart = buffers("qkv", tokens, 3 * hidden).reshape(3 * heads, tokens, -1)
        context = buffers("context", tokens, hidden)
        self.attention(self.linear(x, qkv, apart, buffers), texts, context, buffers)
        return context

    @abstractmethod
    def attention(self, qkv: Matrix, texts: Texts, context: Matrix, buffers: Buffers) -> None:
        """softmax(q kᵀ) v for each text and head, into `context`; `qkv`: 3 · heads × tokens × head, queries scaled."""

    def rest(self, x: Matrix, context: Matrix, layer: FusedLayer, buffers: Buffers) -> None:
        """What follows attention: `x` becomes LayerNorm(x + out(context)), then LayerNorm(x + down(GELU(up(x))))."""
        size = self._products.fused_scratch(*map(ctypes.c_long, (layer.up.c.inputs, layer.up.c.outputs)))
        self._products.fused_rest(
            address(x),
            address(context),
            *map(ctypes.byref, (layer.out.c, layer.attention_norm, layer.up.c, layer.down.c, layer.norm)),
            ctypes.c_long(len(x)),
            *self._scratch(buffers, size),
        )

    def _scratch(self, buffers: Buffers, size: int) -> tuple[ctypes.c_long, ctypes.c_void_p, ctypes.c_long]:
        """The number of threads, memory for them, and the bytes of each."""
        count = threads()
        return ctypes.c_long(count), address(buffers("scratch", count, size, np.uint8)), ctypes.c_long(size)


class FloatLibrary(FusedLibrary):
    """In float32, with the attention of `kernels`."""

    def __init__(self, host: Host, kernels: Kernels) -> None:
        super().__init__(host, ["-DFLOATS"])
        self._kernels = kernels
        self.code += kernels.code

    def attention(self, qkv: Matrix, texts: Texts, context: Matrix, buffers: Buffers) -> None:
        self._kernels.attention(qkv, texts, context)


class Int8Library(FusedLibrary):
    """In int8: also `int8_attention.c`.

    Inside, each row is quantised to 8 bits between its least and its greatest number. A row with a number that is not
    finite becomes NaN, and no other row is touched.
    """

    def __init__(self, host: Host, flags: Sequence[str] = ()) -> None:
        super().__init__(host, flags)
        self._attention = library("int8_attention.c", host, flags=flags, headers=_HEADERS)
        self._attention.int8_attention_scratch.restype = ctypes.c_long
        self.code += (digest_of(self._attention),)

    def attention(self, qkv: Matrix, texts: Texts, context: Matrix, buffers: Buffers) -> None:
        heads, head = len(qkv) // 3, qkv.shape[2]
        size = self._attention.int8_attention_scratch(ctypes.c_long(texts.longest), ctypes.c_long(head))
        self._attention.int8_attention(
            *map(address, (qkv, context, texts.offsets, texts.order)),
            *map(ctypes.c_long, (len(texts.order), heads, head)),
            *self._scratch(buffers, size),
        )


class _Product(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "offset", "bias")),
        ("inputs", ctypes.c_long),
        ("outputs", ctypes.c_long),
        ("pitch", ctypes.c_long),
    ]


class Product:
    """A linear layer's weight (float32, out × in) and its bias (float32), laid out for a library, in int8 or float32.

    Inputs and outputs are padded to multiples of 16, by weights and biases of 0.
    """

    def __init__(self, weight: Floats, bias: Floats, calls: FusedLibrary) -> None:
        outputs, inputs = (up_to(size, _MULTIPLE) for size in weight.shape)
        padding = up_to(outputs, calls.panel) - len(bias)
        values: Array = weight
        if padding or inputs > weight.shape[1]:
            values = np.pad(weight, ((0, padding), (0, inputs - weight.shape[1])))
        bias = np.pad(bias, (0, padding))
        scale, offset, numbers = bias, bias, 1
        if calls.most_byte:
            scale = np.abs(values).max(1) / np.float32(calls.most_byte)
            scale[scale == 0] = 1
            values, numbers = np.rint(values / scale[:, None]).astype(np.int8), 4
            offset = values.sum(1, dtype=np.int64).astype(np.float32) * scale
        laid_out = empty((len(values) // calls.panel, inputs // numbers, calls.panel, numbers), values.dtype)
        laid_out[:] = values.reshape(-1, calls.panel, inputs // numbers, numbers).swapaxes(1, 2)
        self._kept = laid_out, scale, offset, bias
        self.c = _Product(*(each.ctypes.data for each in self._kept), inputs, outputs, inputs * values.itemsize)


class FusedLayer:
    """A layer's weights, laid out for the library, which it calls."""

    def __init__(self, layer: Layer, heads: int, calls: FusedLibrary) -> None:
        self._calls = calls
        self._heads = heads
        self._qkv = Product(*joined_qkv(layer, heads), calls)
        self.out, self.up, self.down = (
            Product(part.weight, part.bias, calls) for part in (layer.out, layer.up, layer.down)
        )
        self._norms = layer.attention_norm, layer.norm
        self.attention_norm, self.norm = map(norm_at, self._norms)

    def __call__(self, x: Matrix, texts: Texts, buffers: Buffers) -> None:
        context = self._calls.attend(x, self._qkv, texts, self._heads, buffers)
        self._calls.rest(x, context, self, buffers)


def fused_layers(name: str, calls: FusedLibrary) -> LayerKind:
    """Layers of a library; `name` as of :class:`LayerKind`."""
    return LayerKind(name, lambda layer, weights: FusedLayer(layer, weights.heads, calls), calls.code)


def int8_layers(calls: Int8Library) -> LayerKind:
    return fused_layers("int8, VNNI" if VNNI & cpu_flags() else "int8, AVX2", calls)


def fits_fused(weights: Weights) -> bool:
    """Whether :class:`FloatLibrary` takes layers of these sizes and this activation."""
    return weights.activation is None and _head(weights) % _MULTIPLE == 0


def fits_int8(weights: Weights) -> bool:
    """Whether :class:`Int8Library` takes layers of these sizes and this activation."""
    return fits_fused(weights) and _head(weights) <= _MOST_HEAD


def _head(weights: Weights) -> int:
    return int(weights.words.shape[1]) // weights.heads


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
