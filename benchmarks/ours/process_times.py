"""What another process does, seen from outside: its CPU time by thread, and which thread holds the GIL."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_EVERY_S = 0.002
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants so far, in user space and in the kernel."""
    own = _seconds(Path(f"/proc/{pid}/stat"), with_ended_children=True)
    return own + sum(cpu_seconds(child) for child in children(pid))


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU seconds of each thread that a process has now, by the kernel's ids."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # it has just ended
            found[int(folder.name)] = _seconds(folder / "stat")
    return found


def children(pid: int) -> list[int]:
    """The children that a process has now."""
    lists = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in lists for child in each.split()]


def _seconds(stat: Path, *, with_ended_children: bool = False) -> float:
    # proc(5): after the command's name, from the 12th field on: utime, stime, and those of the children that ended.
    fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if with_ended_children else 13])) / _TICKS


class Holders:
    """Samples who holds the GIL of another process, every two milliseconds, by reading its memory.

    Args:
        words: addresses, one of which holds the state of the thread with the GIL, or 0.
        names: of threads, by the addresses of their states.
    """

    def __init__(self, pid: int, words: Sequence[int], names: Mapping[str, str]) -> None:
        self._pid, self._words, self._names = pid, words, names
        self._seen: dict[int, Counter[int]] = {word: Counter() for word in words}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """The share of the looks that found each thread holding the GIL; empty if that can't be seen here."""
        self._over.set()
        self._thread.join()
        # Another word that held the same address is that of the last holder, and is never 0.
        seen = next((seen for seen in self._seen.values() if seen[0]), None)
        if seen is None:
            return {}
        shares: dict[str, float] = {}
        for state, count in seen.items():
            if state:
                name = self._names.get(str(state), "?")
                shares[name] = shares.get(name, 0.0) + count / seen.total()
        return shares

    def _look(self) -> None:
        with suppress(OSError), Path(f"/proc/{self._pid}/mem").open("rb", buffering=0) as memory:
            while not self._over.wait(_EVERY_S):
                for word, seen in self._seen.items():
                    seen[int.from_bytes(os.pread(memory.fileno(), 8, word), "little")] += 1
