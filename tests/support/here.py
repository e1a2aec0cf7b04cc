"""What most end-to-end tests ask for, in one fixture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import redis as redis_py

from embedctl.queueing.broker import Broker
from embedctl_config.settings import Settings
from tests.support.changes import Write
from tests.support.processes import RunEmbedctl
from tests.support.workers import StartWorker


@dataclass(frozen=True)
class Here:
    """A test's own folder, and its Redis with all that talks to it."""

    #: The variables of the processes that start here. A test may change them.
    environment: dict[str, str]
    folder: Path
    settings: Settings
    broker: Broker
    raw: redis_py.Redis
    embedctl: RunEmbedctl
    start_worker: StartWorker
    write: Write
