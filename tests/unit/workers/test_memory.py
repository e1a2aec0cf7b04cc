"""The bound for a worker's memory in quarantine: what a text asks for beyond it is refused, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from embedctl_workers.machine import memory

#: Says what became of allocations of these sizes in GiB, which are never touched.
_SCRIPT = """
import sys
import numpy as np
from embedctl_workers.machine.memory import bound_memory
bound = bound_memory()
for size in sys.argv[1:]:
    try:
        np.empty(int(float(size) * 2**30), np.uint8)
        print("had")
    except MemoryError:
        print("refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux bounds what a process has to itself")
def test_what_is_asked_for_beyond_the_bound_is_refused_and_the_process_goes_on() -> None:
    left = memory._bytes_in(memory._MACHINE, "MemTotal") / 2**30
    sizes = ["0.5", str(0.75 * left), "0.5"]  # most of what there is, at least
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *sizes], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["had", "refused", "had"]
