"""Tests that need hardware are skipped where it is missing, and listed at the end, with and without xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUITE = """
import sys

import pytest


@pytest.mark.needs("gpu")
def test_on_a_gpu():
    raise AssertionError("there is none")


@pytest.mark.needs("neuron")
def test_on_a_neuron_core():
    raise AssertionError("there is none")


def test_on_anything():
    assert "torch" not in sys.modules, "imported by what decides on marks"
"""


#: As much of torch as is asked on a machine without a GPU: to import the real one takes seconds.
TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
"""


def run(folder: Path, *options: str) -> str:
    (folder / "test_marked.py").write_text(SUITE)
    (folder / "torch.py").write_text(TORCH)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.support.hardware",
            "-p",
            "no:cacheprovider",
            "-p",
            "xdist",
            *options,
            str(folder),
        ],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(any(Path("/dev").glob("neuron[0-9]*")), reason="there is a Neuron device")
@pytest.mark.parametrize("options", [["-k", "core or gpu"], ["-n", "2", "-k", "core or gpu"]], ids=["alone", "xdist"])
def test_what_was_not_run_is_listed_with_what_it_needs(options: list[str], tmp_path: Path) -> None:
    shown = run(tmp_path, *options)
    assert "2 skipped" in shown
    for needs, test in (
        ("a GPU that PyTorch sees", "test_on_a_gpu"),
        ("torch_neuronx and a Neuron device", "test_on_a_neuron_core"),
    ):
        section = shown.partition(f" not tested: needs {needs} ")[2]
        assert section.splitlines()[1].endswith(f"test_marked.py::{test}")


def test_nothing_is_imported_for_marks_that_no_chosen_test_bears(tmp_path: Path) -> None:
    shown = run(tmp_path, "-m", "not needs")
    assert "1 passed" in shown
    assert "not tested" not in shown
