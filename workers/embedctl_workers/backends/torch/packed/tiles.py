"""Layers in bf16 on the matrix unit of the CPU, their sums, GELU, softmax and LayerNorm in float32."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from embedctl_config.errors import ModelError
from embedctl_workers.backends.torch.packed.buffers import Array, Buffers, Matrix, empty
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.backends.torch.packed.kernels import Kernels, NormStruct, norm_at
from embedctl_workers.backends.torch.packed.layers import LayerKind, by_heads, joined_qkv
from embedctl_workers.backends.torch.packed.native import address, library
from embedctl_workers.backends.torch.packed.weights import Floats, Layer, Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.machine.teams import threads
from embedctl_workers.models.compiling import digest_of

#: NumPy has no bfloat16: matrices of this type hold its bits.
BF16 = np.uint16
#: Widths are multiples of a tile's 32 columns.
_TILE = 32
#: Texts of fewer tokens are faster in float32 than in two parts on tiles (AMX: 0.8 x at 16 tokens, 1.4 x at 40).
_SHORT = 24


@dataclass(frozen=True, slots=True)
class Unit:
    """What computes products of bf16 matrices: a choice in `tiles.h`.

    `flags` are the compiler's; without the CPU flags in `needs`, the unit is not there.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


AMX = Unit(
    "AMX bf16",
    ("-DTILES_AMX", "-mamx-tile", "-mamx-bf16", "-mavx512bf16"),
    frozenset({"amx_tile", "amx_bf16", "avx512_bf16"}),
)
AVX512 = Unit("AVX512_BF16", ("-DTILES_AVX512", "-mavx512bf16"), frozenset({"avx512_bf16"}))
#: The code for AMX on tile registers in plain C, for tests on CPUs without AMX.
EMULATED = Unit("emulated tiles", ("-DTILES_EMULATED",))


class Tiles:
    """The libraries made from `products_bf16.c` and `attention_bf16.c` for a unit; raises as :func:`.native.library`.

    A ModelError too if the system does not let this process use the unit.
    """

    def __init__(self, unit: Unit, host: Host) -> None:
        self.unit = unit
        headers = ("tiles.h", "vectors.h")
        self.products, self.attention = (
            library(name, host, flags=unit.flags, headers=headers) for name in ("products_bf16.c", "attention_bf16.c")
        )
        for each in (self.products, self.attention):
            if not each.may_run():
                raise ModelError(f"the system does not let this process use {unit.name}")
            each.scratch_bytes.restype = ctypes.c_long
        self.products.packed_bytes.restype = ctypes.c_long
        self.code = tuple(map(digest_of, (self.products, self.attention)))


def tile_layers(tiles: Tiles, parts: int, kernels: Kernels) -> LayerKind:
    """Products on tiles, each with what follows it; the kernels are for attention over short texts in float32.

    `parts` of each factor of a product: 1 is its value in bf16; 2 adds what that leaves, for nearly the accuracy of
    float32.
    """
    name = f"{kernels.name}, {tiles.unit.name}" + (" x 3" if parts == 2 else "")
    return LayerKind(name, partial(_TileLayer, tiles=tiles, parts=parts, kernels=kernels), tiles.code + kernels.code)


def fit_tiles(weights: Weights) -> bool:
    """Whether :func:`tile_layers` can compute this model."""
    return weights.activation is None and weights.words.shape[1] % _TILE == 0


class _Product(ctypes.Structure):
    """The C struct `product`."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class _Rest(ctypes.Structure):
    """The C struct `rest`."""

    _fields_ = (
        *((name, _Product) for name in ("out", "up", "down")),
        *((name, NormStruct) for name in ("attention_norm", "norm")),
        *((name, ctypes.c_long) for name in ("attended", "hidden", "wide")),
    )


@dataclass(frozen=True, slots=True)
class _Packed:
    """A weight, laid out for tiles, and its bias, both filled up with zeros to whole tiles."""

    weight: Array
    bias: Floats

    @classmethod
    def of(cls, tiles: Tiles, parts: int, weight: Floats, bias: Floats) -> Self:
        weight = np.ascontiguousarray(weight)  # an address keeps nothing alive
        shape = *map(ctypes.c_long, weight.shape), parts
        packed = empty((tiles.products.packed_bytes(*shape),), np.uint8)
        tiles.products.pack_weight(address(weight), address(packed), *shape)
        return cls(packed, np.pad(bias, (0, -len(bias) % _TILE)))

    @property
    def at(self) -> _Product:
        return _Product(address(self.weight), address(self.bias))


class _TileLayer:
    def __init__(self, layer: Layer, weights: Weights, tiles: Tiles, parts: int, kernels: Kernels) -> None:
        self._tiles, self._parts, self._kernels = tiles, parts, kernels
        self._heads = heads = weights.heads
        self._hidden = len(layer.query.bias)
        self._attention = TileAttention(tiles, heads, self._hidden // heads, parts)
        qkv, out = filled_up(layer, heads)
        self._qkv = self._packed(*qkv)
        self._kept = (
            self._packed(*out),
            self._packed(layer.up.weight, layer.up.bias),
            self._packed(layer.down.weight, layer.down.bias),
        )
        self._norms = layer.attention_norm, layer.norm
        self._rest = _Rest(
            *(each.at for each in self._kept),
            *map(norm_at, self._norms),
            self._attention.width,
            self._hidden,
            len(self._kept[1].bias),
        )

    def _packed(self, weight: Floats, bias: Floats) -> _Packed:
        return _Packed.of(self._tiles, self._parts, weight, bias)

    def __call__(self, x: Matrix, texts: Texts, buffers: Buffers) -> None:
        tokens, attended = len(x), self._attention.width
        kind = BF16 if self._parts == 1 else np.float32
        qkv = buffers("qkv", tokens, 3 * attended, kind)
        context = buffers("context", tokens, attended, kind)
        products = self._tiles.products
        widths = map(ctypes.c_long, (self._hidden, max(attended, self._rest.wide)))
        scratch = _scratch(buffers, "products", products.scratch_bytes(*widths, self._parts))
        products.project(
            address(x),
            *map(address, (self._qkv.weight, self._qkv.bias, qkv)),
            *map(ctypes.c_long, (tokens, self._hidden, 3 * attended)),
            *scratch,
            self._parts,
        )
        self._attend(qkv, texts, context, buffers)
        products.finish(
            address(x), address(context), ctypes.byref(self._rest), ctypes.c_long(tokens), *scratch, self._parts
        )

    def _attend(self, qkv: Matrix, texts: Texts, context: Matrix, buffers: Buffers) -> None:
        long, short = texts.parted(_SHORT) if self._parts == 2 else (texts, None)
        if short is not None:
            self._kernels.attention(by_heads(qkv, self._heads), short, context)
        if long is not None:
            self._attention(qkv, long, context, buffers)


class TileAttention:
    """Attention on tiles, over heads that fill them; `head` is one's size in the model, `parts` as :func:`tile_layers`.

    `width` is that of all heads together, each filled up to whole tiles.
    """

    def __init__(self, tiles: Tiles, heads: int, head: int, parts: int) -> None:
        self._library = tiles.attention
        self._heads = heads
        self._head = head + -head % _TILE
        self._parts = parts
        self.width = heads * self._head

    def __call__(self, qkv: Matrix, texts: Texts, context: Matrix, buffers: Buffers) -> None:
        """softmax(q kᵀ) v for each text and head, into `context`, tokens × width.

        `qkv` is tokens × (3 · width), queries scaled. Both are bfloat16 for one part, else float32.
        """
        each = self._library.scratch_bytes(*map(ctypes.c_long, (texts.longest, self._head)), self._parts)
        self._library.attention(
            *map(address, (qkv, context, texts.offsets, texts.order)),
            *map(ctypes.c_long, (len(texts.order), self._heads, self._head)),
            *_scratch(buffers, "attention", each),
            self._parts,
        )


def filled_up(layer: Layer, heads: int) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Weight and bias of query, key and value, and of what follows attention, for :class:`TileAttention`.

    A head that fills no tiles gets places whose queries, keys, values and weights are zero.
    """
    qkv, qkv_bias = joined_qkv(layer, heads)
    return (
        (_heads_filled_up(qkv, 3 * heads), _heads_filled_up(qkv_bias, 3 * heads)),
        (_heads_filled_up(layer.out.weight.T, heads).T, layer.out.bias),
    )


def _heads_filled_up(rows: Floats, heads: int) -> Floats:
    """The rows of each head, then rows of zeros up to whole tiles."""
    head, numbers = len(rows) // heads, rows.shape[1:]
    filled = np.zeros((heads, head + -head % _TILE, *numbers), np.float32)
    filled[:, :head] = rows.reshape(heads, head, *numbers)
    return filled.reshape(-1, *numbers)


def _scratch(buffers: Buffers, name: str, each: int) -> tuple[ctypes.c_void_p, ctypes.c_long]:
    """Memory for every thread, and how much of it each has."""
    return address(buffers(f"{name}' scratch", threads(), each, np.uint8)), ctypes.c_long(each)
