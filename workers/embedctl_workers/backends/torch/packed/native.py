"""The C files of the packed engine: compiled for the CPU at hand, once, and loaded."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

from embedctl_workers.machine.host import Host
from embedctl_workers.models.compiling import compiled

_FLAGS = ("-O3", "-fopenmp", "-fPIC")
_OPENMP = re.compile(r"/.*/lib[gi]?omp[^/]*\.so.*")


def library(name: str, host: Host, *, flags: Sequence[str] = (), headers: Sequence[str] = ()) -> ctypes.CDLL:
    """The library made from one C file of this package; raises as :func:`compiled`.

    `flags` are the compiler's, beside those of every file; `headers` are those that the file includes, directly or not.
    """
    here = files("embedctl_workers.backends.torch.packed")
    return compiled(here / name, (*_FLAGS, *flags), host, _load, headers=[here / header for header in headers])


def _load(path: Path) -> ctypes.CDLL:
    # The library is linked without OpenMP, because two of its runtimes in one process compete for the CPUs. This loads
    # torch's.
    for runtime in openmp_runtimes():
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW)


def openmp_runtimes() -> list[str]:
    """The files of OpenMP that this process has loaded."""
    return sorted(set(_OPENMP.findall(Path("/proc/self/maps").read_text())))


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Where the tensor's values begin, for a C function; ValueError if they have gaps between them."""
    if not tensor.is_contiguous():
        raise ValueError("a kernel takes only contiguous tensors")
    return ctypes.c_void_p(tensor.data_ptr())
