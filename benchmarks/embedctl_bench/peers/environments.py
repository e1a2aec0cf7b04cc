"""A pinned environment for each peer, made when first needed, because no two peers agree on their versions."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from embedctl_bench.peers.child import Unavailable, run

HERE = Path(__file__).parent
#: The folder on a peer's PYTHONPATH, and the package in it: a peer sees nothing else of ours.
ADAPTERS, PACKAGE = HERE / "adapters", "embedctl_adapters"
_INSTALL_S = 1800
#: Packages that harm an environment: torchvision, built for CUDA, breaks transformers beside a torch for the CPU.
_REMOVED = {"st-openvino": ["torchvision"]}
#: Packages without what they need: PyLate's index, which does not encode, needs an older torch than others do.
ALONE = {"pylate": ["pylate==1.6.0"]}


def requirements_of(environment: str) -> Path:
    return HERE / f"{environment}.txt"


def requirements_digest() -> str:
    """A digest of all peers' pinned versions."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HERE.glob("*.txt")))).hexdigest()[:32]


def is_installed(environment: str, place: Path) -> bool:
    """Whether the environment exists and matches its requirements; our own environment (empty name) always does."""
    if not environment:
        return True
    installed = place / environment / "installed.txt"
    return installed.is_file() and installed.read_bytes() == requirements_of(environment).read_bytes()


def python_of(environment: str, place: Path) -> Path:
    """The Python of a peer's environment, rebuilt if its requirements changed, else Unavailable; ours for no name."""
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
        # All in one step: torch's pin keeps pip from preferring a newer build of torch.
        run([python, "-m", "pip", "install", "--quiet", "-r", requirements], log, timeout=_INSTALL_S)
        if alone := ALONE.get(environment):
            run([python, "-m", "pip", "install", "--quiet", "--no-deps", *alone], log, timeout=_INSTALL_S)
        if removed := _REMOVED.get(environment):
            run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *removed], log, timeout=_INSTALL_S)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"environment {environment} can't be made: {error}") from error
    (folder / "installed.txt").write_bytes(requirements.read_bytes())
    return python


def environment_for(environment: str) -> tuple[str, dict[str, str]]:
    """The package of adapters by its name in that environment, and the variables with which Python finds it."""
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    if not environment:
        return f"{__package__}.{ADAPTERS.name}.{PACKAGE}", variables
    return PACKAGE, {**variables, "PYTHONPATH": str(ADAPTERS)}
