"""torch's compiler, for layers that run batches of a few sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

#: Takes a function, and returns it compiled.
Compiler = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]


def changing(size: int) -> torch.Tensor:
    """A tensor without elements whose first dimension is `size`: for the compiler, an int that need not stay the same.

    An int itself is a constant of the code, so each new one would compile again.
    """
    return let_change(torch.empty(size, 0))


def let_change(tensor: torch.Tensor) -> torch.Tensor:
    """Tell the compiler that the tensor's first dimension need not stay the same."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def compiler() -> Compiler:
    """torch's compiler, for shapes that never change except where :func:`let_change` says so."""
    made: Any = partial(torch.compile, dynamic=False)
    compiles: Compiler = made
    return compiles
