"""The threads that share an operator: each has a core of its own, and nothing else of the process is bound to it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedctl_workers.machine import devices
from tests.support.tiny_models import Tiny, make_model

#: Encodes in two threads, and tells where the threads of the process may run: in a forward, and afterwards.
_SCRIPT = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from embedctl_config.hardware import ModelEntry
from embedctl_workers.backends import load_backend
from embedctl_workers.machine import devices
from embedctl_workers.machine.host import Host

def masks():
    found = {}
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # a team ends a moment after its leader
            found[task] = sorted(os.sched_getaffinity(task))
    return found

pinned = devices.pin(None)
host = Host(pinned.threads, Path(sys.argv[2]), places=pinned.places)
backend = load_backend("torch", "tiny", entry=ModelEntry(source=sys.argv[1]), host=host, options={"engine": "padded"})
import numpy as np, torch
loaded, variables = masks()[os.getpid()], [name for name in os.environ if name.startswith("OMP_")]
during = []
real = backend._engine

def engine(tokens, rows):
    before = set(masks())
    torch.ones(1 << 20).mul_(2)  # large enough to be shared
    new = masks()
    during.append([new[threading.get_native_id()], [mask for task, mask in new.items() if task not in before]])
    return real(tokens, rows)

backend._engine = engine

def encode(_):
    tokens = backend.tokenize(["a text", "another"], None)
    backend.finish(backend.forward(tokens, np.arange(2)), normalize=True)
    return sorted(os.sched_getaffinity(0))

after = []
for _ in range(2):
    with ThreadPoolExecutor(1) as thread:
        after += thread.map(encode, range(2))
print(json.dumps({"loaded": loaded, "variables": variables, "during": during, "after": after}))
"""

_LOAD_LIBGOMP = """
import ctypes
from importlib.util import find_spec
from pathlib import Path
for library in Path(find_spec("torch").submodule_search_locations[0]).glob("lib/libgomp*"):
    ctypes.CDLL(str(library))
"""

Found = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.needs("cores")  # a team of one thread has nothing to share


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), Tiny())


@pytest.fixture
def found(model: Path, cache_folder: Path) -> Found:
    """Runs the script; the cache is shared, so that only the first process compiles."""
    return functools.partial(run_script, model, cache_folder)


def run_script(model: Path, cache: Path, *, first: str = "", **variables: str) -> dict[str, Any]:
    """What the script tells.

    Args:
        first: what it does before.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_CPU"))}
    done = subprocess.run(
        [sys.executable, "-c", first + _SCRIPT, str(model), str(cache)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_each_thread_of_a_team_has_a_core_and_its_leader_has_all_cpus_again_afterwards(found: Found) -> None:
    cpus = os.sched_getaffinity(0)
    places = [sorted(core) for core in devices.cores_of(cpus)]
    answer = found()
    assert answer["loaded"] == sorted(cpus)
    assert answer["variables"] == ["OMP_NUM_THREADS"]
    assert answer["after"] == [sorted(cpus)] * 4
    assert [leader for leader, _ in answer["during"]] == [places[0]] * 4
    first, again, *_ = answer["during"]
    assert sorted(first[1]) == places[1:]
    assert again[1] == []  # the team stays
    assert sorted(answer["during"][2][1]) == places[1:]  # the other thread's team


@pytest.mark.slow
def test_teams_that_were_loaded_before_are_left_alone(found: Found) -> None:
    """Another library may have loaded GNU OpenMP: its threads are not bound, and would follow a bound leader."""
    answer = found(first=_LOAD_LIBGOMP)
    everywhere = sorted(os.sched_getaffinity(0))
    assert [leader for leader, _ in answer["during"]] == [everywhere] * 4
    assert answer["during"][0][1] == [everywhere] * (len(devices.cores_of(os.sched_getaffinity(0))) - 1)


@pytest.mark.slow
def test_who_has_said_where_threads_run_is_heard(found: Found) -> None:
    answer = found(OMP_PROC_BIND="false")
    assert {tuple(leader) for leader, _ in answer["during"]} == {tuple(sorted(os.sched_getaffinity(0)))}
    assert set(answer["variables"]) == {"OMP_PROC_BIND", "OMP_NUM_THREADS"}
