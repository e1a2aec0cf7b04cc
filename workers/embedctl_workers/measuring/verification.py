"""The measurements of `embedctl model verify` for a model on this machine, and their report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from embedctl_config.errors import ModelError
from embedctl_config.settings import Settings
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.accuracy.report import Report
from embedctl_workers.encoding.known_good import load_encoder
from embedctl_workers.machine import provenance
from embedctl_workers.machine.devices import Pinned
from embedctl_workers.machine.host import Host
from embedctl_workers.measuring.short_benchmark import Benchmark, benchmark
from embedctl_workers.models.cache import cache_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verification:
    """The whole report."""

    measured: datetime
    about: Mapping[str, str]  #: model, class, backend, engine, precision and fingerprint
    place: Mapping[str, str]  #: device, driver, system and load, as they were before the measurements
    versions: Mapping[str, str]
    accuracy: Report
    speed: Benchmark | None  #: None if the gate failed: the speed of wrong vectors does not matter

    @property
    def passed(self) -> bool:
        """Whether a worker would start."""
        return self.accuracy.passed

    def as_json(self) -> dict[str, object]:
        return {
            **self.about,
            "passed": self.passed,
            "measured": self.measured.isoformat(timespec="seconds"),
            "place": dict(self.place),
            "versions": dict(self.versions),
            "accuracy": self.accuracy.as_json(),
            "speed": self.speed.as_json() if self.speed else None,
        }

    def __str__(self) -> str:
        facts = {
            **self.about,
            **self.place,
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "measured": f"{self.measured:%Y-%m-%d %H:%M} UTC",
        }
        about = "\n".join(f"{name:<12} {value}" for name, value in facts.items())
        speed = str(self.speed) if self.speed else "speed: not measured, because these are not the model's vectors"
        return f"{about}\n\n{self.accuracy}\n\n{speed}"


def verify_model(settings: Settings, hardware: str, model: str, pinned: Pinned) -> Verification:
    """Load a model as a worker of a class would, compare its vectors with torch's in fp32, and measure its speed.

    Raises as a worker does, and a ModelError if the class's backend runs no model.
    """
    entry = settings.hardware_class(hardware)
    host = Host(pinned.threads, cache_folder(settings), places=pinned.places)
    place = provenance.describe(pinned)
    encoder = load_encoder(settings, entry, model, host)
    try:
        accuracy = measure_backend(encoder, entry, host)
        if accuracy is None:
            raise ModelError(
                f"the backend {entry.backend!r} of class {hardware} runs no model: there is nothing to compare"
            )
        speed = None
        if accuracy.passed:
            log.info("model %s: measuring its speed", model)
            speed = benchmark(encoder)
        return Verification(
            measured=datetime.now(UTC),
            about={
                "model": model,
                "class": hardware,
                "backend": entry.backend,
                "engine": encoder.backend.engine,
                **({"chosen": encoder.backend.chosen} if encoder.backend.chosen else {}),
                "precision": entry.precision,
                "fingerprint": encoder.backend.fingerprint,
            },
            place=place,
            versions=provenance.versions(),
            accuracy=accuracy,
            speed=speed,
        )
    finally:
        encoder.backend.close()
