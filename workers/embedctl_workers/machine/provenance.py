"""The provenance of a measurement: its device, the driver, and the versions of all software involved."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from embedctl_config.cpu import cpu_name
from embedctl_workers.machine import nvidia
from embedctl_workers.machine.devices import Accelerator, Pinned

#: Distributions that may take part in computing a vector. The installed ones are listed.
PACKAGES = (
    "embedctl",
    "numpy",
    "tokenizers",
    "transformers",
    "sentence-transformers",
    "torch",
    "triton",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "torch-neuronx",
    "neuronx-cc",
)
_MODULES = Path("/sys/module")


def describe(pinned: Pinned) -> dict[str, str]:
    """The device, its driver, the CPUs, the system and its load, in words."""
    accelerator = pinned.accelerator
    facts = {"device": f"CPU {cpu_name()}"}
    if accelerator is not None:
        name = f"{accelerator.kind} {accelerator.index} {accelerator.name}".rstrip()
        facts = {"device": f"{name} ({accelerator.uid})", "driver": _driver(accelerator), "host": cpu_name()}
    facts["cpus"] = f"{pinned.cpu_list}, {pinned.threads} compute threads"
    facts["system"] = platform.platform()
    facts["load"] = f"{os.getloadavg()[0]:.2f} in the minute before"
    return facts


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver(accelerator: Accelerator) -> str:
    """The driver's version, from NVIDIA's driver itself, or else from the kernel."""
    of_nvidia = accelerator.kind == "gpu" and not accelerator.rocm
    if of_nvidia and (version := nvidia.driver_version()):
        return f"nvidia {version}"
    name = "nvidia" if of_nvidia else "amdgpu" if accelerator.rocm else accelerator.kind
    try:
        return f"{name} {(_MODULES / name / 'version').read_text(encoding='ascii').strip()}"
    except (OSError, UnicodeDecodeError):
        return "unknown"
