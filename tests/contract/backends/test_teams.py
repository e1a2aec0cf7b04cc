"""The threads that share an operator: each has a core of its own, and nothing else of the process is bound to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from embedctl_workers.machine import devices

#: Computes in two threads, and tells where the threads of the process may run: in a forward, and afterwards. A backend
#: without a model stands in for those that compute with torch.
_SCRIPT = """
import json, os, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from embedctl_workers import backends
from embedctl_workers.machine import devices, teams
from embedctl_workers.machine.host import Host

def masks():
    found = {}
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # a team ends a moment after its leader
            found[task] = sorted(os.sched_getaffinity(task))
    return found

class Backend:
    OPTIONS = ()

    @classmethod
    def load(cls, model, entry, host, options):
        global torch
        import torch
        torch.set_num_threads(host.threads)
        return cls()

    def __init__(self):
        self.place = teams.OwnPlace()

    def forward(self):
        with self.place:
            before = set(masks())
            torch.ones(1 << 20).mul_(2)  # large enough to be shared
            new = masks()
            during.append([new[threading.get_native_id()], [mask for task, mask in new.items() if task not in before]])

pinned = devices.pin(None)
backends.BACKENDS["torch"] = ("__main__:Backend", "torch")
host = Host(pinned.threads, Path(), places=pinned.places)
backend = backends.load_backend("torch", "none", entry=None, host=host, options={})
loaded, variables = masks()[os.getpid()], [name for name in os.environ if name.startswith("OMP_")]
during = []

def compute(_):
    backend.forward()
    return sorted(os.sched_getaffinity(0))

after = []
for _ in range(2):
    with ThreadPoolExecutor(1) as thread:
        after += thread.map(compute, range(2))
print(json.dumps({"loaded": loaded, "variables": variables, "during": during, "after": after}))
"""

pytestmark = pytest.mark.needs("cores")  # a team of one thread has nothing to share


def test_each_thread_of_a_team_has_a_core_and_its_leader_has_all_cpus_again_afterwards() -> None:
    cpus = os.sched_getaffinity(0)
    places = [sorted(core) for core in devices.cores_of(cpus)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_CPU"))}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["loaded"] == sorted(cpus)
    assert answer["variables"] == ["OMP_NUM_THREADS"]
    assert answer["after"] == [sorted(cpus)] * 4
    assert [leader for leader, _ in answer["during"]] == [places[0]] * 4
    first, again, *_ = answer["during"]
    assert sorted(first[1]) == places[1:]
    assert again[1] == []  # the team stays
    assert sorted(answer["during"][2][1]) == places[1:]  # the other thread's team
