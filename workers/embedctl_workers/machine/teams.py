"""OpenMP, with which torch and our kernels compute; keeps the threads that share an operator on cores of their own.

Each thread that computes has its own team. On two CPUs, a forward of 32 tokens took 5 ms where it takes 3, for two
reasons. If all teams together have more threads than there are CPUs, idle or not, GNU OpenMP lets each thread sleep
after every operator. And the system may wake a thread on the CPU of the thread that wakes it, which then has to wait.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_RUNTIME = re.compile(r"/.*/lib[gi]?omp[^/]*\.so.*")
#: With the policy `active`, a thread polls as often as :data:`~.devices.SPIN_VARIABLE` says, whatever other teams there
#: are, up to 1,000 times.
_VARIABLES = {"OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "active"}
_PLACES = "OMP_PLACES"
#: Who has set one of these has chosen otherwise.
_OF_USERS = (_PLACES, *_VARIABLES, "GOMP_CPU_AFFINITY")

#: The places of this process's teams; empty if they have none.
_bound: tuple[frozenset[int], ...] = ()


def bind(places: Sequence[frozenset[int]]) -> None:
    """Load OpenMP so that its teams have one thread at each place, the CPUs of a thread; raises ModuleNotFoundError.

    It reads its variables only then. Does nothing if it is loaded already, for fewer than two places, or if the
    user set a variable for threads' places.
    """
    global _bound  # GNU OpenMP binds its threads once, for the whole process
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    if len(places) < 2 or openmp_runtimes() or any(name in os.environ for name in _OF_USERS):
        return
    cpus = os.sched_getaffinity(0)
    os.environ |= {**_VARIABLES, _PLACES: ",".join(f"{{{','.join(map(str, sorted(place)))}}}" for place in places)}
    try:
        load_openmp()
        # It has bound this thread, too. Otherwise it had been loaded before, and threads that a bound one starts would
        # all share its place.
        if os.sched_getaffinity(0) == places[0]:
            _bound = tuple(places)
    finally:
        for name in (_PLACES, *_VARIABLES):  # a child process may be given other CPUs
            del os.environ[name]
        os.sched_setaffinity(0, cpus)


@cache
def load_openmp() -> ctypes.CDLL:
    """The OpenMP of torch, for all libraries of this process, whatever others have brought; an OSError if it has none.

    Where it is not a file of torch's own package, torch is imported for it.
    """
    spec = find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or ()
    found = [str(path) for folder in folders for path in Path(folder).glob("lib/libgomp*.so*")]
    if not found:
        import_module("torch")
        found = openmp_runtimes()
    if not found:
        raise OSError("torch was built without OpenMP")
    return ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)


def openmp_runtimes() -> list[str]:
    """The files of OpenMP that this process has loaded."""
    return sorted(set(_RUNTIME.findall(Path("/proc/self/maps").read_text())))


def threads() -> int:
    """How many threads compute what the calling thread begins."""
    return int(load_openmp().omp_get_max_threads())


def set_threads(count: int) -> None:
    """Set the number for the calling thread, and for torch, if it is loaded, in all threads."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)
    load_openmp().omp_set_num_threads(count)


class OwnPlace:
    """A context in which the calling thread, which leads a team, is at the team's first place. Threads may share it.

    The thread may use all CPUs of the team afterwards.
    """

    def __init__(self) -> None:
        self._first = _bound[0] if _bound else None
        self._all = frozenset().union(*_bound)

    def __enter__(self) -> None:
        self._move(self._first)

    def __exit__(self, *_: object) -> None:
        self._move(self._all)

    def _move(self, cpus: frozenset[int] | None) -> None:
        if cpus:
            with suppress(OSError):  # these CPUs were taken from the process since; it runs on the others
                os.sched_setaffinity(0, cpus)
