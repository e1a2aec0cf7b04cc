"""Whether the workers of this machine, or of this container, do their work: for health checks."""

from __future__ import annotations

from embedctl.broker import Broker
from embedctl_config.errors import WorkerError
from embedctl_config.settings import Settings


def check_ready(settings: Settings, hardware: str | None) -> list[str]:
    """The names of the workers that run here, of one class or of all; each is alive and makes progress.

    Raises:
        WorkerError: there is none, or one encodes without progress.
        BrokerUnavailable: Redis can't be reached.
    """
    broker = Broker.connect(settings)
    try:
        found = [row for row in broker.workers.here() if hardware in (None, row.hardware)]
    finally:
        broker.close()
    if not found:
        raise WorkerError(f"no live worker{f' of class {hardware}' if hardware else ''} on this machine")
    for row in found:
        if row.activity == "hung":
            raise WorkerError(f"{row.name} has finished no batch for {row.quiet_s:.0f} s")
    return [row.name for row in found]
