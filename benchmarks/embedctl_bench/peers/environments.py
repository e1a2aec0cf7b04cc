"""A pinned environment for each peer, made when it is first needed: no two of them agree on their versions."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from embedctl_config.errors import WorkerError

HERE = Path(__file__).parent
#: The folder on a peer's PYTHONPATH, and the package in it: a peer sees nothing else of ours.
ADAPTERS, PACKAGE = HERE / "adapters", "embedctl_adapters"
_INSTALL_S = 1800
#: What an environment is better off without: torchvision, for CUDA, breaks transformers beside a torch for the CPU.
_REMOVED = {"st-openvino": ["torchvision"]}


class Unavailable(WorkerError):
    """Raised when a peer can't be measured; the message says why, on one line."""


def requirements_of(environment: str) -> Path:
    """The file that pins what a peer's environment holds."""
    return HERE / f"{environment}.txt"


def is_installed(environment: str, place: Path) -> bool:
    """Whether the environment is there and holds what its requirements say; our own always does."""
    if not environment:
        return True
    installed = place / environment / "installed.txt"
    return installed.is_file() and installed.read_bytes() == requirements_of(environment).read_bytes()


def python_of(environment: str, place: Path) -> Path:
    """The Python of a peer's environment, built anew where its requirements changed; our own for the empty name.

    Args:
        place: the folder of environments.

    Raises:
        Unavailable: it can't be built.
    """
    if not environment:
        return Path(sys.executable)
    requirements = requirements_of(environment)
    folder = place / environment
    python = folder / "bin" / "python"
    if is_installed(environment, place):
        return python
    sys.stderr.write(f"{environment}: installing {requirements.name} into {folder}\n")
    log = place / f"{environment}.install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        venv.create(folder, clear=True, with_pip=True)
        # All in one step: torch's pin is what keeps pip from preferring a newer build of it.
        run([python, "-m", "pip", "install", "--quiet", "-r", requirements], log, timeout=_INSTALL_S)
        if removed := _REMOVED.get(environment):
            run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *removed], log, timeout=_INSTALL_S)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"environment {environment} can't be made: {error}") from error
    (folder / "installed.txt").write_bytes(requirements.read_bytes())
    return python


def environment_for(environment: str) -> tuple[str, dict[str, str]]:
    """The package of adapters as a Python of that environment finds it, and the variables for that."""
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    if not environment:
        return f"{__package__}.{ADAPTERS.name}.{PACKAGE}", variables
    return PACKAGE, {**variables, "PYTHONPATH": str(ADAPTERS)}


def run(command: list[str | Path], log: Path, *, timeout: float, variables: Mapping[str, str] | None = None) -> None:
    """Run a command, with these variables besides our own, and with its output in a log.

    Raises:
        Unavailable: it failed or took too long; the message is the log's last line.
    """
    with log.open("wb") as stream:
        try:
            status = subprocess.run(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
                env={**os.environ, **(variables or {})},
            ).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(f"took more than {timeout:.0f} s ({log})") from None
    if status:
        raise Unavailable(f"{last_line(log)} ({log})")


def last_line(log: Path) -> str:
    """The last line of a log that says something: of a traceback, the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was logged"
