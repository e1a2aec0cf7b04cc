"""Options and runs for the tests of `embedctl bench`, without a process or a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_bench.asking import Asked
from embedctl_bench.measuring.comparison import SystemRuns
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Answer, Vectors
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.registry import Setting, System
from embedctl_bench.peers.tuned import Run, Task
from embedctl_config.settings import Settings


def asked(folder: Path, **changes: Any) -> Asked:
    given = {
        "settings": Settings(cache_dir=str(folder / "cache")),
        "command": "embedctl bench grid",
        "models": ("m",),
        "classes": ("cpu",),
        "device": "cpu",
        "cpus": frozenset({0}),
        "output": folder,
        "quick": False,
        "peers": (),
        "fresh": True,
    }
    return Asked(**{**given, **changes})


def runs(
    name: str,
    *seconds: float,
    load: str = "W1",
    tokens: int = 1000,
    error: float = 1e-7,
    precision: str = "fp32",
    cosine: float = 0.99,
    **more: Any,
) -> SystemRuns:
    """A system with runs of one load; ours, or a floor, if it is called so."""
    each = {at: Run(value, tokens, **more) for at, value in enumerate(seconds)}
    ours, floor = name.startswith(("embedctl", "gateway", "direct")), name.startswith("floor")
    accuracy = {} if floor else {"max_abs_error": error, "min_cosine": cosine, "mean_cosine": 0.995}
    return SystemRuns(name, name, precision, ours, floor, accuracy=accuracy, loads={load: each} if each else {})


class Process:
    """Stands in for a process: infinity fails in its second round, and fastembed can't be started."""

    events: list[str]
    offered: list[int]

    def __init__(self, system: System, task: Task, **options: Any) -> None:
        if system.name == "fastembed":
            raise Unavailable("no wheels")
        self.events.append(f"{system.name} loaded")
        self.offered.append(len(system.settings))
        self._name, self._calls = system.name, 0
        self.chosen = Setting(1, {}, {"batch": 8})
        self.tried = [(system.settings[0], {"seconds": 1.0})]
        self.versions = {"torch": "2"}
        self.computes = ""

    def encode(self, repeat: int = 1) -> Answer:
        self.events.append(self._name)
        self._calls += 1
        if self._name == "infinity" and self._calls == 3:
            raise Unavailable("out of memory")
        shape = (2, 0) if self._name.startswith("floor") else (2, 3)
        return Answer(np.ones(shape, np.float32), 0.0, 2.0, 20)

    def requests(self, asked: Sequence[Sequence[str]], callers: int = 0) -> tuple[Run, Vectors]:
        texts = sum(map(len, asked))
        return Run(0.5 if self._name == "floor" else 1.0, 8 * texts), np.ones((texts, 3), np.float32)

    def close(self) -> None:
        self.events.append(f"{self._name} closed")
