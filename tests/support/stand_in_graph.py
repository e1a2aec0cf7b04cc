"""A CUDA graph on the CPU: the operations that were captured, with the very tensors that they had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "repeat_interleave.self_Tensor", "masked_select", "unique")


def waits(operation: Any, args: Any) -> bool:
    """Whether an operation would wait for a GPU, because the host needs a value or a size from it."""
    name = str(operation)
    by_mask = name.startswith("aten.index.") and any(each is not None and each.dtype == torch.bool for each in args[1])
    return by_mask or any(word in name for word in _WAITING)


class StandInGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Work that was captured. It is strict about what a CUDA graph would get wrong silently.

    Each run reads and writes the tensors of the capture. Before it, all memory that captures took is overwritten, for
    graphs that share it use the same addresses. After a capture, nothing is written yet.

    Args:
        beside: a graph whose memory it shares.
    """

    def __init__(self, work: Callable[[], object], beside: StandInGraph | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._taken: list[torch.Tensor] = [] if beside is None else beside._taken
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._written: list[torch.Tensor] = []
        with self:
            work()
        _spoil([*self._taken, *self._written])

    def replay(self) -> None:
        _spoil(self._taken)
        for operation, args, kwargs, made in self._steps:
            for there, new in zip(_tensors(made), _tensors(operation(*args, **kwargs)), strict=True):
                if there.data_ptr() != new.data_ptr():  # neither a view nor an argument
                    there.copy_(new)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a capture on a GPU leaves compiled code alone as well

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(operation, args):
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        made = operation(*args, **(kwargs or {}))
        self._steps.append((operation, args, kwargs or {}, made))
        if operation._schema.is_mutable:
            self._written.append(args[0])
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        self._taken += [each for each in _tensors(made) if each.untyped_storage().data_ptr() not in given]
        return made


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))


def _spoil(tensors: list[torch.Tensor]) -> None:
    for each in tensors:
        each.fill_(torch.nan if each.is_floating_point() else 0)
