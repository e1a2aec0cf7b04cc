"""torch's matrix products on a CPU in fp32, bf16 and int8, with which the floor of engines is made.

Products of embedctl's own are not among them: these are what a library offers on the same unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from embedctl_config.cpu import cpu_flags

#: Instruction sets, by the kernel's names, with which a CPU multiplies in bf16. oneDNN emulates them elsewhere.
_BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})

#: Multiplies rows × inputs by a weight.
Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class CpuProduct:
    """One way of multiplying.

    `source` makes random rows × inputs, in the type that it takes. `prepare` makes a product with a random weight,
    outputs × inputs, laid out for a number of rows.
    """

    source: Callable[[int, int], torch.Tensor]
    prepare: Callable[[int, int, int], Multiply]


def check(kind: str) -> None:
    """RuntimeError if this CPU has no product of a kind."""
    if kind == "bf16" and not _BF16 & cpu_flags():
        raise RuntimeError("this CPU has no instructions for bf16")


def _random(kind: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """Random values: with zeros, a matrix unit is faster."""
    if kind.is_floating_point:
        return torch.randn(rows, width, dtype=kind)
    ends = torch.iinfo(kind)
    return torch.randint(ends.min, ends.max + 1, (rows, width), dtype=kind)


def _mm(kind: torch.dtype, outputs: int, inputs: int, rows: int) -> Multiply:
    weight = _random(kind, inputs, outputs)
    product = torch._int_mm if kind is torch.int8 else torch.mm
    return lambda x: product(x, weight)


def _prepacked(kind: torch.dtype, outputs: int, inputs: int, rows: int) -> Multiply:
    """oneDNN's product on weights in its own layout, chosen for this many rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(_random(kind, outputs, inputs), rows)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return y

    return multiply


def _prepacked_int8(outputs: int, inputs: int, rows: int) -> Multiply:
    """The same for unsigned inputs, which is what VNNI multiplies: with signed ones, oneDNN may fall back to a loop."""
    packed = torch.ops.onednn.qlinear_prepack(_random(torch.int8, outputs, inputs), [rows, inputs])
    scales, zeros = torch.full((outputs,), 0.01), torch.zeros(outputs, dtype=torch.int32)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            x, 0.1, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y

    return multiply


def _of(kind: torch.dtype) -> dict[str, CpuProduct]:
    source = partial(_random, kind)
    return {
        "mm": CpuProduct(source, partial(_mm, kind)),
        "prepacked": CpuProduct(source, partial(_prepacked, kind)),
    }


#: Kind → the name of a product in settings → the product. oneDNN's operators are those that torch's compiler emits.
PRODUCTS: Mapping[str, Mapping[str, CpuProduct]] = {
    "fp32": _of(torch.float32),
    "bf16": _of(torch.bfloat16),
    "int8": {
        "mm": CpuProduct(partial(_random, torch.int8), partial(_mm, torch.int8)),
        "prepacked": CpuProduct(partial(_random, torch.uint8), _prepacked_int8),
    },
}
