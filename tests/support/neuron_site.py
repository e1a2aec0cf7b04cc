"""An environment in which `torch_neuronx` is the fake from tests/fakes. The test chooses the machine's hardware."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from embedctl_workers.backends.neuron import backend as neuron
from embedctl_workers.backends.neuron import recipe, runtime
from embedctl_workers.models.builders import BuildOptions
from tests.support.builds_here import build_here

FAKE = Path(__file__).parent / "fakes" / "torch_neuronx.py"


def installed(folder: Path, package: str, version: str) -> None:
    """Write the metadata that pip leaves for an installed package into a folder of packages."""
    facts = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def use_site(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make this process and its children find the packages of a folder first."""
    patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", str(folder))
    patch.setitem(sys.modules, "torch_neuronx", None)  # so that an import made meanwhile is undone at the end
    del sys.modules["torch_neuronx"]


def fake_site(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Install the fake runtime, with the release of this PyTorch."""
    torch = ".".join(runtime.version_of("torch").split(".")[:2])
    installed(folder, runtime.RUNTIME, f"{torch}.0.2.13")
    installed(folder, runtime.COMPILER, "2.20.1.0")
    (folder / FAKE.name).symlink_to(FAKE)
    use_site(folder, patch)


def fake_machine(folder: Path, patch: pytest.MonkeyPatch, product: str = "inf2.xlarge") -> None:
    """Give this process a Neuron device, as far as it can tell."""
    (folder / "dev").mkdir(parents=True)
    (folder / "dev" / "neuron0").touch()
    (folder / "product_name").write_text(f"{product}\n")
    patch.setattr(runtime, "_DEVICES", folder / "dev")
    patch.setattr(runtime, "_PRODUCT", folder / "product_name")


def fake_neuron(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Set up both the fake runtime and the device. Workers run what this process traces for a device elsewhere; it is
    neither measured nor kept."""
    fake_site(folder / "site", patch)
    fake_machine(folder / "machine", patch)
    build_here(patch)
    patch.setattr(neuron, "artifact_for", partial(recipe.artifact_for, how=BuildOptions(target="inf2")))
