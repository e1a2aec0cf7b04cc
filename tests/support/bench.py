"""Requests and answers for the tests of `embedctl bench`, without a process or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.sampling import Rounds
from embedctl_config.settings import Settings
from embedctl_workers.models.files import ModelFiles


def asked(folder: Path, **changes: Any) -> Asked:
    given = {
        "settings": Settings(cache_dir=str(folder / "cache")),
        "command": "embedctl bench grid",
        "models": ("m",),
        "classes": ("cpu",),
        "cpus": frozenset({0}),
        "output": folder,
        "quick": False,
        "peers": (),
        "price": None,
        "fresh": True,
    }
    return Asked(**{**given, **changes})


def steady(rate: float) -> Rounds[float]:
    return Rounds([rate] * 3, {str(at): rate for at in range(3)})


class Exact:
    def __init__(self, model: ModelFiles) -> None:
        pass

    def requests(self, tokens: int, batch: int, count: int) -> list[list[str]]:
        return [[f"{tokens} tokens"] * batch]
