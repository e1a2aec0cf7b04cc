"""Layers of the packed engine with random weights, and what compiles its sources for CPUs that are not here."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from embedctl_workers.backends.torch.packed.weights import Layer, Part


def some_layer(hidden: int, wide: int, eps: float = 1e-5) -> Any:
    """A :class:`Layer` whose parts are torch's modules, which can be called."""
    query, key, value, out = (torch.nn.Linear(hidden, hidden) for _ in range(4))
    norms = [torch.nn.LayerNorm(hidden, eps=eps) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight, 1.0, 0.2)
        torch.nn.init.normal_(norm.bias)
    up, down = torch.nn.Linear(hidden, wide), torch.nn.Linear(wide, hidden)
    parts: list[Any] = [query, key, value, out, norms[0], up, down, norms[1]]
    return Layer(*(part.requires_grad_(False) for part in parts))


def in_numpy(layer: Any) -> Layer:
    """The same layer in arrays, of the same memory."""
    parts = (getattr(layer, each.name) for each in fields(Layer))
    return Layer(*(Part(each.weight.numpy(), each.bias.numpy(), getattr(each, "eps", 0.0)) for each in parts))


def assemble(source: Path, folder: Path, *flags: str) -> None:
    """Compile a source; the test is skipped if the compiler does not know what the flags ask for."""
    command = [shutil.which("gcc") or "cc", "-O1", *flags, "-c", str(source), "-o", str(folder / "made.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "bad value" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this compiler does not know that CPU")
    assert done.returncode == 0, done.stderr
