"""Helpers for processes that tests start: code to run first, their variables, and whether they are alive."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

#: Runs the command line: arguments, `stdin` and variables of the environment.
RunEmbedctl = Callable[..., subprocess.CompletedProcess[str]]


_ROOT = Path(__file__).parents[2]
_LIMITS = "\nfrom tests.support.limits import put_limits\nput_limits()\n"


def before_all_else(folder: Path, name: str, program: str, modules: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that make every Python run a program before any code of embedctl (through site.py's sitecustomize).

    It then takes the limits from its variables, as forks do.

    Args:
        folder: a test's own.
        name: of the folder within it that goes onto PYTHONPATH.
        program: Python source.
        modules: source of modules that can then be imported, by name.
    """
    place = folder / name
    place.mkdir(exist_ok=True)
    for module, source in {"sitecustomize": program + _LIMITS, **(modules or {})}.items():
        (place / f"{module}.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(place), str(_ROOT), os.environ.get("PYTHONPATH")]))}


@contextmanager
def changed(environment: MutableMapping[str, str], variables: Mapping[str, str]) -> Iterator[None]:
    """Change the variables of processes that start within the block."""
    before = dict(environment)
    environment.update(variables)
    yield
    environment.clear()
    environment.update(before)


def is_running(pid: int) -> bool:
    """Whether a process is alive. A zombie is not."""
    return process_state(pid) not in ("", "Z")


def process_state(pid: int) -> str:
    """A process' state, as in proc(5): T is stopped, Z a zombie. Empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def command_line(pid: int) -> bytes:
    """The words of a process' command, each with a zero byte behind it. Empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def children(pid: int) -> list[int]:
    """The existing children of a process; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on at this moment, all different."""
    with ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in found]
