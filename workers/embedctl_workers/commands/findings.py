"""What `embedctl model tune` has found for a model, for the devices of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from embedctl_config.errors import WorkerError
from embedctl_config.settings import Settings
from embedctl_workers.commands.options import plural
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.machine.discovery import find_gpus
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.tuning import Tuned, load_tuned


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found for one class, and this kind of GPU; None for a class on CPUs."""

    hardware: str
    tuned: Tuned
    gpu: Accelerator | None

    def __str__(self) -> str:
        tuned = self.tuned
        workers = f"{plural(tuned.workers, 'worker')} × {plural(tuned.threads, 'thread')}"
        if self.gpu is not None:
            workers = f"{plural(tuned.workers, 'worker')} on each {self.gpu.name or self.gpu.uid}"
        return f"{workers}, with {plural(tuned.cpus, 'CPU')}: {tuned.tokens_per_s:,.0f} tokens/s"

    def as_json(self) -> dict[str, Any]:
        return {
            "class": self.hardware,
            "gpu": self.gpu.name or self.gpu.uid if self.gpu else None,
            **asdict(self.tuned),
        }


def findings(settings: Settings, fingerprint: str) -> list[Finding]:
    """The findings for a model, by its fingerprint, in the order of the classes."""
    cache = cache_folder(settings)
    if not any((cache / "tuned").glob("*.json")):  # to ask for devices takes a while
        return []
    return [
        Finding(name, tuned, gpu)
        for name, entry in settings.classes.items()
        for gpu in _kinds(entry.device)
        if (tuned := load_tuned(entry, fingerprint, cache, gpu)) is not None
    ]


def _kinds(device: str) -> Iterator[Accelerator | None]:
    """One GPU of each kind, for a class on GPUs; None for a class on CPUs."""
    if device == "cpu":
        yield None
    elif device == "gpu":
        with suppress(WorkerError):  # no GPU is found, so nothing applies
            yield from {(gpu.name or gpu.uid, gpu.memory): gpu for gpu in find_gpus()}.values()
