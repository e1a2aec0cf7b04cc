"""Tests that need hardware are skipped where it is missing, and listed at the end, with xdist too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
SUITE = """
import pytest


@pytest.mark.needs("gpu")
def test_on_a_gpu():
    raise AssertionError("there is none")


@pytest.mark.needs("neuron")
def test_on_a_neuron_core():
    raise AssertionError("there is none")
"""


#: As much of torch as is asked on a machine without a GPU: to import the real one takes seconds.
TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
"""


@pytest.mark.skipif(any(Path("/dev").glob("neuron[0-9]*")), reason="there is a Neuron device")
def test_what_was_not_run_is_listed_with_what_it_needs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_marked=SUITE, torch=TORCH)
    pytester.makeini("[pytest]\nmarkers =\n    needs\n")
    plugins = ["-p", "tests.support.hardware", "-p", "no:cacheprovider", "-p", "xdist"]
    done = pytester.runpytest_subprocess(*plugins, "-n", "1")
    assert done.ret == pytest.ExitCode.OK
    for needs, test in (
        ("a GPU that PyTorch sees", "test_on_a_gpu"),
        ("torch_neuronx and a Neuron device", "test_on_a_neuron_core"),
    ):
        section = done.stdout.str().partition(f" not tested: needs {needs} ")[2]
        assert section.splitlines()[1].endswith(f"test_marked.py::{test}")
