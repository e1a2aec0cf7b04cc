"""The facts of this machine that a GPU's figures depend on: CPUs, memory, driver, clocks, and versions.

    python -m benchmarks.ours.gpu_machine [--cpu]

Exits with 1 if a package is missing, or torch sees no GPU and `--cpu` does not say that there need be none.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from embedctl_config.cpu import cpu_name

_PACKAGES = (
    *("torch", "sentence-transformers", "transformers", "tokenizers", "numpy", "celery", "kombu", "redis"),
    *("pytest", "pytest-timeout", "hypothesis"),
)
_TOOLS = (
    ["lscpu"],
    ["redis-server", "--version"],
    ["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE"],
    ["nvidia-smi"],
)
_TOOL_S = 20


def main() -> None:
    """Run the command line."""
    memory = Path("/proc/meminfo").read_text(encoding="ascii").split("\n", 1)[0]
    print(f"Python {platform.python_version()}, {platform.platform()}, {cpu_name()}")
    print(f"{len(os.sched_getaffinity(0))} CPUs of {os.cpu_count()}; {memory}")
    missing = [name for name in _PACKAGES if not _shown(name)]
    for command in _TOOLS:
        _tell(command)
    if missing:
        sys.exit(f"missing: {', '.join(missing)}")
    _of_torch(trial="--cpu" in sys.argv[1:])


def _shown(package: str) -> bool:
    """Print a package's version; whether it is installed."""
    try:
        print(f"{package} {version(package)}")
    except PackageNotFoundError:
        print(f"{package}: not installed")
        return False
    return True


def _tell(command: list[str]) -> None:
    print(f"\n$ {' '.join(command)}", flush=True)
    if tool := shutil.which(command[0]):
        subprocess.run([tool, *command[1:]], timeout=_TOOL_S, check=False, stderr=subprocess.STDOUT)
    else:
        print("not here")


def _of_torch(*, trial: bool) -> None:
    import torch

    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch has no types for it
    print(f"\ntorch for CUDA {torch.version.cuda}, ROCm {torch.version.hip}; cuDNN {cudnn}", end="; ")
    print(f"flash attention: {torch.backends.cuda.is_flash_attention_available()}")
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        print(f"GPU {number}: {facts}")
    if not (torch.cuda.is_available() or trial):
        sys.exit("torch sees no GPU")


if __name__ == "__main__":
    main()
