"""A pinned environment for each peer, made when it is first needed: no two of them agree on their versions."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "peers"
_INSTALL_S = 1800
#: What an environment is better off without: torchvision, for CUDA, breaks transformers beside a torch for the CPU.
_REMOVED = {"st-openvino": ["torchvision"]}


class Unavailable(Exception):
    """Raised when a peer can't be measured; the message says why, on one line."""


def python_of(environment: str) -> Path:
    """The Python of a peer's environment, built anew where its requirements changed; our own for the empty name.

    Raises:
        Unavailable: it can't be built.
    """
    if not environment:
        return Path(sys.executable)
    requirements = HERE / f"{environment}.txt"
    folder = BUILD / environment
    python = folder / "bin" / "python"
    installed = folder / "installed.txt"
    if installed.is_file() and installed.read_bytes() == requirements.read_bytes():
        return python
    print(f"{environment}: installing {requirements.name} into {folder}", file=sys.stderr, flush=True)
    log = BUILD / f"{environment}.install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        venv.create(folder, clear=True, with_pip=True)
        # All in one step: torch's pin is what keeps pip from preferring a newer build of it.
        run([python, "-m", "pip", "install", "--quiet", "-r", requirements], log, timeout=_INSTALL_S)
        if removed := _REMOVED.get(environment):
            run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *removed], log, timeout=_INSTALL_S)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"environment {environment} can't be made: {error}") from error
    installed.write_bytes(requirements.read_bytes())
    return python


def run(command: list[str | Path], log: Path, *, timeout: float, cwd: Path | None = None) -> None:
    """Run a command with its output in a log.

    Raises:
        Unavailable: it failed or took too long; the message is the log's last line.
    """
    with log.open("wb") as stream:
        try:
            status = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, timeout=timeout, check=False, cwd=cwd
            ).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(f"took more than {timeout:.0f} s ({log})") from None
    if status:
        raise Unavailable(f"{last_line(log)} ({log})")


def last_line(log: Path) -> str:
    """The last line of a log that says something: of a traceback, the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was logged"
