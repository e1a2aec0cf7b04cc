"""An environment with no packages but those of a role, made in a moment of links into the tests' own environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_VERBS = Path(__file__).with_name("verbs_alone.py")


def packages_of(requirement: Requirement) -> set[str]:
    """The distribution of a requirement, and all that it brings here, by their canonical names."""
    found, waiting = set[tuple[str, str]](), [requirement]
    while waiting:
        each = waiting.pop()
        for extra in ("", *each.extras):
            key = (canonicalize_name(each.name), extra)
            if key not in found:
                found.add(key)
                brought = map(Requirement, metadata.requires(each.name) or ())
                waiting += [other for other in brought if not other.marker or other.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def make_environment(folder: Path, role: str = "embedctl") -> Path:
    """Make an environment in which pip would have installed this requirement alone, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    for name in packages_of(Requirement(role)):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return python


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


class Commands:
    """Runs commands of `embedctl` in another environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
        """Run a command to its end."""
        asking, answering = self._process.stdin, self._process.stdout
        assert asking is not None
        assert answering is not None
        asking.write(json.dumps({"arguments": list(arguments), "environment": dict(environment)}) + "\n")
        asking.flush()
        return Ended(**json.loads(answering.readline()))


@contextmanager
def commands_of(python: Path, folder: Path) -> Iterator[Commands]:
    """The commands of the environment with this Python, run in a folder, with no program on PATH."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EMBEDCTL_", "PYTHON"))}
    process = subprocess.Popen(
        [python, _VERBS],
        cwd=folder,
        env={**variables, "PATH": str(folder), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield Commands(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with a command that a failing test left running
