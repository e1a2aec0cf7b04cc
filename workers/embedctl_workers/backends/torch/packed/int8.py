"""Layers in int8: products of bytes by the CPU's own instruction (VNNI), and float32 between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch

from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.kernels import Norm, Texts
from embedctl_workers.backends.torch.packed.layers import LayerKind, joined, joined_qkv
from embedctl_workers.backends.torch.packed.native import address, library
from embedctl_workers.backends.torch.packed.weights import Layer, Weights
from embedctl_workers.machine.host import Host

#: A head's columns are a multiple of this, and at most so many.
_MULTIPLE, _MOST_HEAD = 16, 256
_HEADERS = ("vectors.h", "int8.h")


class Int8Library:
    """Calls into the libraries made from `int8.c` and `int8_attention.c`; raises as :func:`library`.

    Activations are float32 with one row per token. Inside, each row is quantised to 8 bits between its least and its
    greatest number. A row with a number that is not finite becomes NaN, and no other row is touched.
    """

    def __init__(self, host: Host, flags: Sequence[str] = ()) -> None:
        self._products = library("int8.c", host, flags=flags, headers=_HEADERS)
        self._attention = library("int8_attention.c", host, flags=flags, headers=_HEADERS)
        for function in (self._products.int8_scratch, self._attention.int8_attention_scratch):
            function.restype = ctypes.c_long
        #: How many outputs of a weight lie together.
        self.panel = ctypes.c_long.in_dll(self._products, "int8_panel").value

    def linear(self, x: torch.Tensor, product: Product, y: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """x · Wᵀ + b into `y`, which is returned; ValueError if `x` or `y` has another size than the product's.

        `y` is tokens × outputs; or parts × tokens × width, each part with `width` of the outputs, a multiple of 16.
        """
        if x.shape[1] != product.c.inputs or y.numel() != len(x) * product.c.outputs:
            raise ValueError(f"a product of {product.c.inputs} × {product.c.outputs} from {x.shape} into {y.shape}")
        size = self._products.int8_scratch(*map(ctypes.c_long, (product.c.inputs, product.c.inputs)))
        self._products.int8_linear(
            address(x),
            ctypes.byref(product.c),
            address(y),
            *map(ctypes.c_long, (y.shape[-1], len(x))),
            *self._scratch(buffers, size),
        )
        return y

    def attention(
        self, qkv: torch.Tensor, texts: Texts, heads: int, context: torch.Tensor, buffers: Buffers
    ) -> torch.Tensor:
        """softmax(q kᵀ) v for each text and head, into `context`, which is returned.

        `qkv` is 3 · heads × tokens × head, queries scaled.
        """
        head = context.shape[1] // heads
        size = self._attention.int8_attention_scratch(ctypes.c_long(texts.longest), ctypes.c_long(head))
        self._attention.int8_attention(
            *map(address, (qkv, context, texts.offsets, texts.order)),
            *map(ctypes.c_long, (len(texts.order), heads, head)),
            *self._scratch(buffers, size),
        )
        return context

    def rest(self, x: torch.Tensor, context: torch.Tensor, layer: Int8Layer, buffers: Buffers) -> None:
        """What follows attention: `x` becomes LayerNorm(x + out(context)), then LayerNorm(x + down(GELU(up(x))))."""
        size = self._products.int8_scratch(*map(ctypes.c_long, (layer.up.c.inputs, layer.up.c.outputs)))
        self._products.int8_rest(
            address(x),
            address(context),
            *map(ctypes.byref, (layer.out.c, layer.attention_norm, layer.up.c, layer.down.c, layer.norm)),
            ctypes.c_long(len(x)),
            *self._scratch(buffers, size),
        )

    def _scratch(self, buffers: Buffers, size: int) -> tuple[ctypes.c_long, ctypes.c_void_p, ctypes.c_long]:
        """The number of threads, memory for them, and the bytes of each."""
        threads = torch.get_num_threads()
        memory = buffers("scratch", threads, size, torch.uint8)
        return ctypes.c_long(threads), address(memory), ctypes.c_long(size)


class _Product(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "offset", "bias")),
        ("inputs", ctypes.c_long),
        ("outputs", ctypes.c_long),
    ]


class Product:
    """A linear layer's weight (float32, out × in) in int8, and its bias (float32), laid out for the library.

    Inputs and outputs are padded to multiples of 16, by weights and biases of 0. `panel` as of :class:`Int8Library`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, panel: int) -> None:
        outputs, inputs = (up_to(size, _MULTIPLE) for size in weight.shape)
        padding = up_to(outputs, panel) - len(bias)
        weight = torch.nn.functional.pad(weight, (0, inputs - weight.shape[1], 0, padding))
        scale = weight.abs().amax(1) / 127
        scale[scale == 0] = 1
        rounded = (weight / scale[:, None]).round()
        self._kept = (
            rounded.to(torch.int8).view(-1, panel, inputs // 4, 4).transpose(1, 2).contiguous(),
            scale,
            rounded.double().sum(1).float() * scale,
            torch.nn.functional.pad(bias, (0, padding)),
        )
        self.c = _Product(*(each.data_ptr() for each in self._kept), inputs, outputs)


class Int8Layer:
    """A layer's weights, laid out for the library, which it calls."""

    def __init__(self, layer: Layer, heads: int, calls: Int8Library) -> None:
        self._calls = calls
        self._heads = heads
        self._qkv = Product(*joined_qkv(layer, heads), calls.panel)
        self.out, self.up, self.down = (
            Product(*joined((part, 1.0)), calls.panel) for part in (layer.out, layer.up, layer.down)
        )
        self._norms = [Norm(layer.attention_norm), Norm(layer.norm)]
        self.attention_norm, self.norm = (norm.struct for norm in self._norms)

    def __call__(self, x: torch.Tensor, texts: Texts, buffers: Buffers) -> None:
        tokens, hidden = x.shape
        qkv = buffers("qkv", tokens, 3 * hidden).view(3 * self._heads, tokens, -1)
        self._calls.linear(x, self._qkv, qkv, buffers)
        context = self._calls.attention(qkv, texts, self._heads, buffers("context", tokens, hidden), buffers)
        self._calls.rest(x, context, self, buffers)


def int8_layers(calls: Int8Library) -> LayerKind:
    return LayerKind("int8, VNNI", lambda layer, weights: Int8Layer(layer, weights.heads, calls))


def fits_int8(weights: Weights) -> bool:
    """Whether the library takes layers of these shapes and this activation."""
    head = weights.words.shape[1] // weights.heads
    return weights.activation is None and head <= _MOST_HEAD and head % _MULTIPLE == 0


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
