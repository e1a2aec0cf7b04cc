"""Keeps the threads that share an operator on cores of their own: GNU OpenMP's teams, which torch computes with.

Each thread that computes has its own team. On two CPUs, a forward of 32 tokens took 5 ms where it takes 3, for two
reasons. If all teams together have more threads than there are CPUs, idle or not, GNU OpenMP lets each thread sleep
after every operator. And the system may wake a thread on the CPU of the thread that wakes it, which then has to wait.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

#: Loads GNU OpenMP, which reads its variables then.
_LIBRARY = "torch"
#: With the policy `active`, a thread polls as often as :data:`~.devices.SPIN_VARIABLE` says, whatever other teams there
#: are, up to 1,000 times.
_VARIABLES = {"OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "active"}
_PLACES = "OMP_PLACES"
#: Who has set one of these has chosen otherwise.
_OF_USERS = (_PLACES, *_VARIABLES, "GOMP_CPU_AFFINITY")

#: The places of this process's teams; empty if they have none.
_bound: tuple[frozenset[int], ...] = ()


def bind(places: Sequence[frozenset[int]]) -> None:
    """Load torch so that its teams have one thread at each place, the CPUs of a thread; raises ModuleNotFoundError.

    Does nothing if torch is loaded already, for fewer than two places, or if the user set a variable for threads'
    places.
    """
    global _bound  # GNU OpenMP binds its threads once, for the whole process
    if len(places) < 2 or _LIBRARY in sys.modules or any(name in os.environ for name in _OF_USERS):
        return
    cpus = os.sched_getaffinity(0)
    os.environ |= {**_VARIABLES, _PLACES: ",".join(f"{{{','.join(map(str, sorted(place)))}}}" for place in places)}
    try:
        import_module(_LIBRARY)
        # It has bound this thread, too. Otherwise it had been loaded before, and threads that a bound one starts would
        # all share its place.
        if os.sched_getaffinity(0) == places[0]:
            _bound = tuple(places)
    finally:
        for name in (_PLACES, *_VARIABLES):  # a child process may be given other CPUs
            del os.environ[name]
        os.sched_setaffinity(0, cpus)


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
