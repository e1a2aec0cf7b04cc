"""The bound for a worker's memory in quarantine: what a text asks for beyond it is refused, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from embedctl_workers.machine import cgroup

#: Given what its group has left in GiB, says what became of allocations of these sizes, which are never touched.
_SCRIPT = """
import sys
import numpy as np
from embedctl_workers.machine import cgroup
group, *sizes = map(float, sys.argv[1:])
cgroup.memory_left = lambda: group * 2**30
cgroup.bound_memory()
for size in sizes:
    try:
        np.empty(int(size * 2**30), np.uint8)
        print("had")
    except MemoryError:
        print("refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux bounds what a process has to itself")
@pytest.mark.parametrize("group", ["inf", "0.7"])
def test_what_is_asked_for_beyond_the_bound_is_refused_and_the_process_goes_on(group: str) -> None:
    total = cgroup._bytes_in(cgroup._MACHINE, "MemTotal") / 2**30
    # Most of what there is, at least; and in a group, what it has not left.
    sizes = [group, "0.5", str(0.75 * total) if group == "inf" else "0.75", "0.5"]
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *sizes], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["had", "refused", "had"]
