"""Stands in for AWS' `torch_neuronx`: what it traces is the same model on the CPU, of the same fixed shapes.

Made from ../vendor/torch_neuronx.json: it takes no argument and no option of the compiler that is not there. A trace
is a real `torch.jit.ScriptModule`, saved and loaded by `torch.jit`, that takes tensors of the shapes and types of its
example and no others. Nothing that runs on it says anything of a Neuron device.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: The arguments of every trace that was made in this process.
CALLS: list[dict[str, Any]] = []

_RECORDED = json.loads(
    (Path(__file__).resolve().parent.parent / "vendor" / "torch_neuronx.json").read_text(encoding="utf-8")
)
_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(
            each["name"], inspect._ParameterKind[each["kind"]], default=each.get("default", inspect.Parameter.empty)
        )
        for each in _RECORDED["functions"]["trace"]
    ]
)


def trace(*args: Any, **kwargs: Any) -> torch.jit.ScriptModule:
    """As `torch_neuronx.trace`, for the CPU.

    Raises:
        TypeError: an argument that the real one does not take.
        ValueError: an option that the real compiler does not have, or a missing target.
        RuntimeError: it needs a device, and FAKE_NEURON_DEVICES is 0.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    options = _options(given["compiler_args"] or [])
    if given["cpu_backend"] and "--target" not in options:
        raise ValueError("cpu_backend needs --target")
    if not given["cpu_backend"] and os.environ.get("FAKE_NEURON_DEVICES") == "0":
        raise RuntimeError("Init: error condition !(num_devices > 0)")
    if given["compiler_workdir"] is not None and not Path(given["compiler_workdir"]).is_dir():
        raise ValueError("compiler_workdir is no folder")
    CALLS.append({**given, "options": options})
    example = given["example_inputs"]
    example = example if isinstance(example, tuple) else (example,)
    traced = torch.jit.trace(given["func"], example, check_trace=False)  # type: ignore[no-untyped-call]  # torch's own
    return _Fixed(traced, example)


trace.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # what inspect shows of it


def _options(given: str | Sequence[str]) -> dict[str, str]:
    words = given.split() if isinstance(given, str) else list(given)
    options = dict(zip(words[::2], words[1::2], strict=True))
    for name, value in options.items():
        if value not in _RECORDED["compiler"].get(name, ()):
            raise ValueError(f"neuronx-cc: {name} {value} is no option")
    if "--logical-nc-config" in options and options.get("--target", "trn2") != "trn2":
        raise ValueError("NCC_EARG001: only lnc=1 is supported")
    return options


class _Fixed(torch.jit.ScriptModule):
    """A traced module that checks its inputs before it runs."""

    def __init__(self, traced: torch.jit.ScriptModule, example: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.traced = traced
        names = [f"input_{at}" for at in range(len(example))]
        checks = [
            f"    if list({name}.shape) != {list(tensor.shape)} or {name}.dtype != {tensor.dtype}:\n"
            f'        raise RuntimeError("{name} is not of the shape and type that was traced")\n'
            for name, tensor in zip(names, example, strict=True)
        ]
        arguments = ", ".join(f"{name}: Tensor" for name in names)
        self.define(
            f"def forward(self, {arguments}) -> Tensor:\n{''.join(checks)}    return self.traced({', '.join(names)})\n"
        )
