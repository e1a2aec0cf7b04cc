"""`python -m embedctl_bench.measuring.sampled_child REQUEST`: a system of this environment, pinned and loaded.

It answers the requests of :mod:`embedctl_bench.peers.adapters.embedctl_adapters.samples`.
Nothing that starts threads is imported before pinning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedctl_bench.peers.adapters.embedctl_adapters.samples import serve
from embedctl_config.loading import load_settings
from embedctl_workers.machine import devices
from embedctl_workers.models.files import ModelFiles

if TYPE_CHECKING:
    from embedctl_bench.peers.adapters.embedctl_adapters.samples import Runner


def load(request: Mapping[str, Any]) -> tuple[Runner, int]:
    """The system, and its number of compute threads.

    Raises:
        SettingsError, MissingExtra, ModelError: it can't be loaded.
    """
    chosen = request["accelerator"]
    pinned = devices.pin(request["cpus"], accelerator=devices.Accelerator(**chosen) if chosen else None)
    # Only now: these import libraries that size their thread pools as they load.
    from embedctl_bench.measuring.runners import load_runner
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.cache import cache_folder

    settings = load_settings()
    model = request["model"]
    files = ModelFiles(model["name"], Path(model["folder"]), model["fingerprint"])
    host = Host(pinned.threads, cache_folder(settings), places=pinned.places)
    return load_runner(request["runner"], request["hardware"], settings, files, host), pinned.threads


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    serve(load)
