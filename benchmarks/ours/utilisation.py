"""Utilisation of a device by other processes, sampled from outside of them."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_EVERY_S = 0.1


@dataclass
class BusyShares:
    """Busy shares, 0 to 1, each with the time of its reading (seconds since 1970).

    Attributes:
        what: what is measured, or why nothing is; for people.
    """

    what: str
    taken: list[tuple[float, float]] = field(default_factory=list)

    def idle(self, began: float, ended: float) -> float:
        """The share of that time during which the device was idle; NaN without a sample."""
        busy = [share for at, share in self.taken if began <= at <= ended]
        return 1 - sum(busy) / len(busy) if busy else float("nan")


@contextmanager
def gpu_samples(uuid: str) -> Iterator[BusyShares]:
    """The driver's utilisation: the share of the last sixth of a second or so during which any kernel ran."""
    samples = BusyShares("the driver's utilisation: the share of time during which any kernel ran")
    query = ["nvidia-smi", f"--id={uuid}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    tool = subprocess.Popen([*query, f"--loop-ms={_EVERY_S * 1000:.0f}"], stdout=subprocess.PIPE, text=True)
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


@contextmanager
def cpu_samples(cpus: Sequence[int]) -> Iterator[BusyShares]:
    """The kernel's utilisation of CPUs, by all processes."""
    samples = BusyShares("the kernel's utilisation of these CPUs, by all processes")
    done = threading.Event()

    def sample() -> None:
        before = _spent(cpus)
        while not done.wait(_EVERY_S):
            now = _spent(cpus)
            idle, total = (b - a for a, b in zip(before, now, strict=True))
            if total:
                samples.taken.append((time.time(), 1 - idle / total))
            before = now

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()


def _spent(cpus: Sequence[int]) -> tuple[int, int]:
    """Idle ticks and all ticks of CPUs since the machine was started."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    idle = total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in wanted:
            # proc(5): user, nice, system, idle, iowait, irq, softirq, steal; user and nice include guests.
            counted = [int(each) for each in ticks[:8]]
            idle += counted[3] + counted[4]
            total += sum(counted)
    return idle, total
