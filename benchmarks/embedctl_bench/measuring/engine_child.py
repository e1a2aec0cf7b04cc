"""`python -m embedctl_bench.measuring.engine_child REQUEST`: one of the systems of this environment, loaded and pinned.

It is asked as :mod:`embedctl_bench.peers.adapters.embedctl_adapters.samples` says.
Nothing that starts threads is imported before pinning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedctl_bench.peers.adapters.embedctl_adapters.samples import serve
from embedctl_config.settings import load_settings
from embedctl_workers.machine import devices
from embedctl_workers.models.files import ModelFiles

if TYPE_CHECKING:
    from embedctl_bench.peers.adapters.embedctl_adapters.samples import Runner


def load(request: Mapping[str, Any]) -> tuple[Runner, int]:
    """The system, and its compute threads.

    Raises:
        SettingsError, MissingExtra, ModelError: it can't be loaded.
    """
    chosen = request["accelerator"]
    pinned = devices.pin(request["cpus"], accelerator=devices.Accelerator(**chosen) if chosen else None)
    # Only now: these import what sizes its thread pools as it loads.
    from embedctl_bench.measuring.engines import System
    from embedctl_bench.measuring.runners import load_runner
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.cache import cache_folder

    settings = load_settings()
    model = request["model"]
    files = ModelFiles(model["name"], Path(model["folder"]), model["fingerprint"])
    host = Host(pinned.threads, cache_folder(settings))
    return load_runner(System(**request["system"]), settings, files, host), pinned.threads


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    serve(load)
