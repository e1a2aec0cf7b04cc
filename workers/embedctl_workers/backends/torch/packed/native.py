"""The C files of the packed engine: compiled for the CPU at hand, once, and loaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from embedctl_workers.backends.torch.packed.buffers import Matrix
from embedctl_workers.machine.host import Host
from embedctl_workers.machine.teams import load_openmp
from embedctl_workers.models.compiling import compiled

_FLAGS = ("-O2", "-fopenmp", "-fPIC")


def library(name: str, host: Host, *, flags: Sequence[str] = (), headers: Sequence[str] = ()) -> ctypes.CDLL:
    """The library made from one C file of this package; raises as :func:`compiled`.

    `flags` are the compiler's, beside those of every file; `headers` are those that the file includes, directly or not.
    """
    here = files("embedctl_workers.backends.torch.packed")
    return compiled(here / name, (*_FLAGS, *flags), host, _load, headers=[here / header for header in headers])


def _load(path: Path) -> ctypes.CDLL:
    # The library is linked without OpenMP, because two of its runtimes in one process compete for the CPUs.
    load_openmp()
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW)


def address(values: Matrix) -> ctypes.c_void_p:
    """Where the values begin, for a C function; ValueError if they have gaps between them."""
    if isinstance(values, np.ndarray):
        at, whole = values.ctypes.data, values.flags.c_contiguous
    else:
        at, whole = values.data_ptr(), values.is_contiguous()
    if not whole:
        raise ValueError("a kernel takes only contiguous matrices")
    return ctypes.c_void_p(at)
