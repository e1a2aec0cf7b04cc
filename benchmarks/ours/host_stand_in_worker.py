"""A worker as `embedctl worker` starts it, which also knows the backend `stand-in`."""

from __future__ import annotations

from embedctl_workers.backends import BACKENDS
from embedctl_workers.commands.worker import main

if __name__ == "__main__":
    BACKENDS["stand-in"] = ("benchmarks.ours.host_stand_in:StandInBackend", "")
    main(prog_name="embedctl worker")
