"""A health check: whether the workers of this machine, or of this container, are alive and make progress."""

from __future__ import annotations

from embedctl.queueing.broker import Broker
from embedctl_config.errors import WorkerError
from embedctl_config.settings import Settings


def check_ready(settings: Settings, hardware: str | None) -> list[str]:
    """The names of the workers that run here, of a class or, for None, of any.

    A WorkerError if there is no live one, or one makes no progress; BrokerUnavailable if Redis can't be reached.
    """
    broker = Broker.connect(settings)
    try:
        found = [row for row in broker.workers.here() if hardware in (None, row.hardware) and not row.quarantine]
    finally:
        broker.close()
    if not found:
        raise WorkerError(f"no live worker{f' of class {hardware}' if hardware else ''} on this machine")
    for row in found:
        if row.activity == "hung":
            raise WorkerError(f"{row.name} has finished no batch for {row.quiet_s:.0f} s")
    return [row.name for row in found]
