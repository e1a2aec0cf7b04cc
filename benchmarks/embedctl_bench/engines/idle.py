"""Utilisation of the GPU that this process sees, by all processes, as its driver tells it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_EVERY_MS = 100


@dataclass
class BusyShares:
    """Busy shares, 0 to 1, each with the time of its reading (seconds since 1970).

    Attributes:
        what: what is measured, or why nothing is; for people.
    """

    what: str
    taken: list[tuple[float, float]] = field(default_factory=list)

    def idle(self, began: float, ended: float) -> float | None:
        """The share of that time during which the device was idle; None without a sample."""
        busy = [share for at, share in self.taken if began <= at <= ended]
        return 1 - sum(busy) / len(busy) if busy else None


@contextmanager
def gpu_samples() -> Iterator[BusyShares]:
    """The share of the last sixth of a second or so during which any kernel ran, every tenth of a second."""
    samples = BusyShares("the driver's utilisation: the share of time during which any kernel ran")
    query = ["nvidia-smi", f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0')}", "--query-gpu=utilization.gpu"]
    query += ["--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}"]
    try:
        tool = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        samples.what = f"nvidia-smi does not run: {error}"
        yield samples
        return
    reader = threading.Thread(target=_read, args=(tool, samples))
    reader.start()
    try:
        yield samples
    finally:
        tool.terminate()
        tool.wait()
        reader.join()


def _read(tool: subprocess.Popen[str], samples: BusyShares) -> None:
    assert tool.stdout
    for line in tool.stdout:
        try:
            samples.taken.append((time.time(), float(line) / 100))
        except ValueError:  # "[N/A]" on a part of a GPU, and in some virtual machines
            samples.what = f"the driver does not say how busy this GPU is: {line.strip()}"
