"""How long a model took to be ready, for whoever waits for the next time."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import keep, kept

log = logging.getLogger(__name__)


def last_load_s(model: str, entry: HardwareClass, host: Host) -> float | None:
    """Seconds that the model took in the last worker of such a class here; None if that is not known."""
    data = kept(_path(model, entry, host))
    try:
        return None if data is None else float(data)
    except ValueError:
        return None


def note_load_s(model: str, entry: HardwareClass, host: Host, seconds: float) -> None:
    """Note it for :func:`last_load_s`; without a cache that can be written to, nobody is told."""
    try:
        keep(_path(model, entry, host), f"{seconds:.1f}".encode())
    except (OSError, ModelError) as error:
        log.debug("how long model %s took is not noted: %s", model, error)


def _path(model: str, entry: HardwareClass, host: Host) -> Path:
    facts = json.dumps([model, entry.backend, entry.precision])
    return host.cache / "loads" / hashlib.sha256(facts.encode()).hexdigest()[:32]
