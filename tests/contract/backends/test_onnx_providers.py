"""The backend `onnx` on a GPU: what onnxruntime is asked for, and that nothing else is taken for it.

No GPU is used: sessions are onnxruntime's own on the CPU, which says that it has what it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import DeviceLost, SettingsError, WorkerError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.files import ModelFiles, resolve_model

for _needed in ("torch", "sentence_transformers", "onnx", "onnxruntime"):
    pytest.importorskip(_needed)

import onnxruntime  # noqa: E402

from embedctl_workers.backends.onnx import backend as backends  # noqa: E402
from embedctl_workers.backends.onnx import recipe  # noqa: E402
from embedctl_workers.backends.onnx.backend import OnnxBackend  # noqa: E402
from embedctl_workers.backends.onnx.providers import CPU  # noqa: E402
from tests.support.onnx_models import quick_artifact  # noqa: E402
from tests.support.tiny_models import Tiny  # noqa: E402

TINY = Tiny(max_seq_length=64)
CUDA = "CUDAExecutionProvider"


class Runtime:
    """onnxruntime as on a machine with a GPU, as far as it says of itself.

    Attributes:
        asked: the providers of each session.
        falls_back: whether a session runs on the CPU although another provider is there.
        fails: what a run with another provider raises.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[Any]] = []
        self.falls_back = False
        self.fails: Exception | None = None
        real = onnxruntime.InferenceSession

        class Session:
            def __init__(session: Any, graph: str, options: Any, *, providers: list[Any]) -> None:  # noqa: N805
                self.asked.append(providers)
                session.names = ["CPUExecutionProvider"] if self.falls_back else [name for name, _ in providers]
                session.real = real(graph, options, providers=["CPUExecutionProvider"])
                session.get_inputs = session.real.get_inputs

            def get_providers(session: Any) -> Any:  # noqa: N805
                return session.names

            def run(session: Any, outputs: Any, feeds: Any) -> Any:  # noqa: N805
                if session.names[0] != "CPUExecutionProvider" and self.fails is not None:
                    raise self.fails
                return session.real.run(outputs, feeds)

        patch.setattr(onnxruntime, "InferenceSession", Session)
        patch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
        patch.setattr(onnxruntime, "preload_dlls", lambda: None)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


@pytest.fixture
def files(tiny_model: Callable[[Tiny], Path]) -> ModelFiles:
    return resolve_model("tiny", ModelEntry(str(tiny_model(TINY))))


def load(files: ModelFiles, host: Host, provider: str = CPU) -> OnnxBackend:
    return OnnxBackend(files, quick_artifact(files, "onnx", host, fused=False), host, provider)


def test_the_cpu_is_asked_for_unless_another_is_chosen(runtime: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host)
    assert runtime.asked == [[("CPUExecutionProvider", {})]]
    assert (backend.engine.split(", ")[1:], backend.token_budget) == (["fp32", "plain"], 1024)


def test_cuda_computes_in_fp32_without_tf32(runtime: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host, provider="cuda")
    assert runtime.asked == [[(CUDA, {"device_id": "0", "use_tf32": "0"}), ("CPUExecutionProvider", {})]]
    assert (backend.engine.split(", ")[1:], backend.token_budget) == (["fp32", "plain", "cuda"], 8192)


def test_a_provider_that_falls_back_is_refused(runtime: Runtime, files: ModelFiles, host: Host) -> None:
    runtime.falls_back = True
    with pytest.raises(WorkerError, match=f"was asked for {CUDA} and runs CPUExecutionProvider: the libraries of CUDA"):
        load(files, host, provider="cuda")


def test_a_wheel_without_the_provider_is_refused(files: ModelFiles, host: Host) -> None:
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has it")
    with pytest.raises(
        WorkerError, match=f"has no {CUDA}: pip uninstall onnxruntime, then pip install onnxruntime-gpu"
    ):
        load(files, host, provider="cuda")


@pytest.mark.parametrize("provider", ["rocm", True])
def test_the_provider_is_checked(provider: object, files: ModelFiles, host: Host) -> None:
    with pytest.raises(SettingsError, match=f"provider {provider!r} of backend onnx is none of cpu, cuda"):
        OnnxBackend.load("tiny", ModelEntry(str(files.folder)), host, {"provider": provider})


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", True),
        ("CUDA failure 2: out of memory ; GPU=0", False),
        ("Failed to allocate memory for requested buffer of size 42", False),
        ("Non-zero status code returned while running Gather node", False),
    ],
)
def test_a_lost_gpu_is_told_from_a_bad_batch(
    error: str, lost: bool, runtime: Runtime, files: ModelFiles, host: Host
) -> None:
    backend = load(files, host, provider="cuda")
    runtime.fails = RuntimeError(error)
    tokens = backend.tokenize(["word"], None)
    with pytest.raises(DeviceLost if lost else RuntimeError, match=error.partition(":")[0]) as raised:
        backend.forward(tokens, np.arange(1))
    assert isinstance(raised.value, DeviceLost) is lost


def test_a_gpu_runs_the_graph_of_onnxs_own_operators(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []

    def noted(files: ModelFiles, kind: str, host: Host) -> Artifact:
        kinds.append(kind)
        return quick_artifact(files, "onnx", host)

    monkeypatch.setattr(backends, "artifact_for", noted)
    with pytest.raises(WorkerError):
        OnnxBackend.load("tiny", ModelEntry(str(files.folder)), Host(1, tmp_path), {"provider": "cuda"})
    OnnxBackend.load("tiny", ModelEntry(str(files.folder)), Host(1, tmp_path), {})
    assert kinds == [recipe.ONNX_PLAIN, recipe.ONNX]


def test_onnxruntime_with_providers_for_gpus_counts_as_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "onnxruntime-gpu":
            raise metadata.PackageNotFoundError(package)
        return "1.27.0"

    monkeypatch.setattr(metadata, "version", version)
    assert recipe.onnxruntime_version("a test") == "1.27.0"
