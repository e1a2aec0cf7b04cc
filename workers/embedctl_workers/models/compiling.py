"""Compiles one C file for the CPU at hand into the cache folder, once."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from embedctl_config.cpu import compiler_target, cpu_identity
from embedctl_config.errors import ModelError
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import distrusted, keep, private_folder

T = TypeVar("T")

_COMPILE_S = 120
#: What :func:`compiled` raises where there is no library to load.
NOT_COMPILED = (OSError, ModelError, subprocess.SubprocessError)


def compiled(
    source: Traversable,
    flags: Sequence[str],
    host: Host,
    load: Callable[[Path], T],
    headers: Sequence[Traversable] = (),
) -> T:
    """Load the library made from a C file by this machine's compiler for its CPU.

    A library in the cache that can't be loaded is compiled again.

    Args:
        flags: the compiler's, beside the one for the CPU.
        load: loads a shared object; raises OSError if it can't.
        headers: the files that it includes by their bare names, directly or not.

    Raises:
        ModelError: there is no compiler, or it failed; or the library is not in the cache, and `host.build` forbids
            compiling it.
        OSError: the new library can't be loaded.
        SettingsError: as for :func:`.cpu.compiler_target`.
        subprocess.SubprocessError: the compiler hangs, or does not tell its version.
    """
    # Flags that add a unit to the CPU's own come after it.
    flags = (f"-march={compiler_target()}", *flags)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ModelError("there is no C compiler (install gcc)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILE_S)
    texts = {each.name: each.read_text(encoding="utf-8") for each in (source, *headers)}
    parts = [*texts.values(), *flags, version.stdout, cpu_identity()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = private_folder(host.cache / "kernels")
    library = folder / f"{key}.so"
    if library.exists() and not distrusted(library):
        with suppress(OSError):
            return load(library)
    if not host.build:
        raise ModelError("not compiled yet, and --no-build was given")
    keep(library, _made(compiler, tuple(flags), source.name, tuple(texts.items()), folder))
    return load(library)


def digest_of(library: ctypes.CDLL) -> str:
    """Names what a library was :func:`compiled` from: its texts, flags, compiler and CPU."""
    return Path(library._name).stem


def _made(compiler: str, flags: Sequence[str], name: str, texts: Sequence[tuple[str, str]], folder: Path) -> bytes:
    """The library of the text with this name, made in a folder of its own in `folder`, among all of the texts."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        object_file, made = Path(scratch) / "made.o", Path(scratch) / "made.so"
        for each, text in texts:
            (Path(scratch) / each).write_text(text, encoding="utf-8")
        _run([compiler, *flags, "-c", str(Path(scratch) / name), "-o", str(object_file)])
        _run([compiler, "-shared", str(object_file), "-o", str(made), "-lm"])
        return made.read_bytes()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)
    if done.returncode:
        raise ModelError(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
