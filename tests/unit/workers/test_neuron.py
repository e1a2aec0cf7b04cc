"""AWS Neuron without its device: what is refused and why, options, and how rows become runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from embedctl_config.errors import MissingExtra, SettingsError, WorkerError
from embedctl_workers.backends.neuron import runtime
from embedctl_workers.backends.neuron.backend import runs_of
from embedctl_workers.backends.neuron.recipe import TraceOptions
from tests.support.neuron_site import fake_machine, installed, use_site

pytestmark = pytest.mark.slow

#: What `torch_neuronx/__init__.py` of the wheel 1.0 on PyPI does; it also names the repository, which is AWS's own.
PLACEHOLDER = """
raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")
"""


def package(folder: Path, version: str, code: str, patch: pytest.MonkeyPatch) -> None:
    installed(folder, "torch-neuronx", version)
    (folder / "torch_neuronx.py").write_text(code)
    use_site(folder, patch)


@pytest.fixture(autouse=True)
def no_torch_neuronx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)


def test_a_runtime_that_is_not_installed_is_a_missing_extra() -> None:
    if importlib.util.find_spec("torch_neuronx") is not None:
        pytest.skip("torch_neuronx is installed here")
    with pytest.raises(MissingExtra, match=r"backend 'neuron' needs .* pip install 'embedctl\[neuron\]'"):
        runtime.load_runtime()


RELEASE, BROKEN = "2.9.0.2.13", "import ctypes; ctypes.CDLL('/no/_XLAC.so')"


@pytest.mark.parametrize(
    ("version", "code", "torch", "message"),
    [
        ("1.0", PLACEHOLDER, "2.9.1", "1.0 is PyPI's placeholder, and the real one comes from AWS' own index"),
        ("2.11.0.1", "def is_available(): ...", "2.11.0", "torch-neuronx 2.11.0.1 is TorchNeuron, another product"),
        (RELEASE, "def trace(): ...", "2.13.0+cpu", "needs PyTorch 2.9 (at most 2.9, for torch_neuronx.trace)"),
        (RELEASE, BROKEN, "2.13.0", "needs PyTorch 2.9 .*2.13.0 is installed"),
        (RELEASE, BROKEN, "2.9.1", "can't be imported (OSError: /no/_XLAC.so"),
        (RELEASE, "import torch_xla_of_neuron", "2.9.1", "No module named 'torch_xla_of_neuron'"),
    ],
    ids=["placeholder", "TorchNeuron", "torch too new", "torch too new to import", "broken", "incomplete"],
)
def test_what_is_not_the_runtime_is_refused_with_what_to_install_instead(
    version: str, code: str, torch: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, version, code, monkeypatch)
    versions = {"torch": torch, "torch-neuronx": version}
    monkeypatch.setattr(runtime, "version_of", versions.__getitem__)
    with pytest.raises(WorkerError) as refused:
        runtime.load_runtime()
    said = str(refused.value)
    assert all(part in said for part in message.split(".*"))
    assert said.endswith("use AWS' image pytorch-inference-neuronx with torch_neuronx.trace (docs/neuron.md)")
    assert "\n" not in said


def test_a_machine_without_the_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_DEVICES", tmp_path)
    (tmp_path / "neuron_monitor").touch()
    with pytest.raises(
        WorkerError, match=r"there is no Neuron device here .* `embedctl model build MODEL --target inf2`"
    ):
        runtime.require_device()
    fake_machine(tmp_path / "machine", monkeypatch)
    runtime.require_device()


@pytest.mark.parametrize(
    ("product", "target"), [("inf2.xlarge", "inf2"), ("trn1.32xlarge", "trn1"), ("trn2.48xlarge", "trn2")]
)
def test_instances_have_targets(product: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_machine(tmp_path, monkeypatch, product)
    assert runtime.machine_target() == target


@pytest.mark.parametrize(
    ("target", "chosen", "flags"),
    [
        ("trn2", None, ["--logical-nc-config", "2"]),
        ("trn2", "", ["--logical-nc-config", "2"]),
        ("trn2", "1", ["--logical-nc-config", "1"]),
        ("trn1", "1", []),
        ("inf2", "2", []),
    ],
)
def test_traces_are_compiled_for_the_runtimes_logical_cores(
    target: str, chosen: str | None, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    if chosen is not None:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", chosen)
    assert runtime.core_flags(target) == flags


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ('nrt_execute status=101 message="Execution Unit cannot recover"', "NRT_EXEC_UNIT_UNRECOVERABLE (101)"),
        (
            'The following operation failed.\nRuntimeError: nrt_infer status=1202 message="…"',
            "NRT_EXEC_HW_ERR_NC_UE (1202)",
        ),
        ("NRT Error NRT_TIMEOUT(5): Failed to execute", "NRT_TIMEOUT (5)"),
        ("NRT Error NRT_HW_ERROR(6)", "NRT_HW_ERROR (6)"),
        ('nrt_load_collectives status=4 message="Allocation Failure"', None),
        ('nrt_execute status=1003 message="NaN"', None),
        ("Expected input of shape [4, 32]", None),
        ("HTTP status=101", None),
    ],
)
def test_errors_after_which_a_core_is_lost(message: str, lost: str | None) -> None:
    found = runtime.device_lost(RuntimeError(message))
    assert (None if found is None else str(found)) == (lost and f"the Neuron core is lost: {lost}")


def test_options_have_defaults() -> None:
    options = TraceOptions.parse({})
    assert options == TraceOptions([], 16, "matmult", "")
    assert options.flags == ["--model-type", "transformer", "--auto-cast", "matmult", "--auto-cast-type", "bf16"]
    assert options.buckets_for(512) == [32, 64, 128, 256, 512]
    assert options.buckets_for(384) == [32, 64, 128, 256, 384]
    assert options.buckets_for(1000) == [32, 64, 128, 256, 512, 1000]
    assert options.buckets_for(20) == [20]


def test_options_of_a_class() -> None:
    options = TraceOptions.parse({"buckets": "128, 16,64", "batch": 8, "auto_cast": "none", "target": "trn1"})
    assert options == TraceOptions([16, 64, 128], 8, "none", "trn1")
    assert options.flags == ["--model-type", "transformer", "--auto-cast", "none"]
    assert options.buckets_for(128) == [16, 64, 128]
    assert options.buckets_for(100) == [16, 64, 100]
    assert options.buckets_for(10) == [10]
    with pytest.raises(SettingsError, match="ends at 128 tokens, and the model takes 512: add 512"):
        options.buckets_for(512)
    assert TraceOptions.parse({"buckets": 256}).buckets == [256]


def test_every_row_is_in_one_run() -> None:
    rng = np.random.default_rng(0)
    for rows in (1, 3, 4, 5, 8, 9, 100):
        lengths = rng.integers(1, 65, rows)
        runs = runs_of(lengths, [8, 32, 64], 4)
        assert len(runs) == -(-rows // 4)
        assert sorted(np.concatenate([run.at for run in runs]).tolist()) == list(range(rows))
        assert all(lengths[run.at].max() <= run.bucket and 1 <= len(run.at) <= 4 for run in runs)
