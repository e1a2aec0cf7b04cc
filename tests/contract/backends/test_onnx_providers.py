"""The backend `onnx` on a GPU: what onnxruntime is asked for, and that nothing else is taken for it.

No GPU is used: sessions are onnxruntime's own on the CPU, which says that it has what it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import DeviceLost, SettingsError, WorkerError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, resolve_model

for _needed in ("torch", "sentence_transformers", "onnx", "onnxruntime"):
    pytest.importorskip(_needed)

import onnxruntime  # noqa: E402

from embedctl_workers.backends.onnx import backend as backends  # noqa: E402
from embedctl_workers.backends.onnx import providers, recipe  # noqa: E402
from embedctl_workers.backends.onnx.backend import OnnxBackend, OnnxInt8Backend  # noqa: E402
from embedctl_workers.backends.onnx.inputs import GRAPH  # noqa: E402
from embedctl_workers.backends.onnx.providers import MOST_ROWS, ProviderOptions  # noqa: E402
from embedctl_workers.building import onnx as build  # noqa: E402
from embedctl_workers.models.builders import BuildOptions  # noqa: E402
from tests.support.onnx_models import quick_artifact  # noqa: E402
from tests.support.tiny_models import Tiny  # noqa: E402

TINY = Tiny(max_seq_length=64)
CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


class Runtime:
    """onnxruntime as on a machine with a GPU, as far as it says of itself.

    Attributes:
        asked: the providers of each session.
        falls_back: whether a session runs on the CPU although another provider is there.
        runs: rows of each batch that another provider was given.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[Any]] = []
        self.falls_back = False
        self.fails: Exception | None = None
        self.runs: list[int] = []
        real = onnxruntime.InferenceSession

        def names(given: Sequence[Any]) -> list[str]:
            return [each if isinstance(each, str) else each[0] for each in given]

        class Session:
            def __init__(session, graph: str, options: Any, *, providers: list[Any]) -> None:  # noqa: N805
                self.asked.append(providers)
                session.names = ["CPUExecutionProvider"] if self.falls_back else names(providers)
                session.real = real(graph, options, providers=["CPUExecutionProvider"])
                session.get_inputs = session.real.get_inputs

            def get_providers(session) -> list[str]:  # noqa: N805
                return session.names

            def run(session, outputs: Any, feeds: Any) -> Any:  # noqa: N805
                if session.names[0] != "CPUExecutionProvider":
                    self.runs.append(len(feeds["input_ids"]))
                    if self.fails is not None:
                        raise self.fails
                return session.real.run(outputs, feeds)

        patch.setattr(onnxruntime, "InferenceSession", Session)
        patch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, "CPUExecutionProvider"])
        patch.setattr(onnxruntime, "preload_dlls", lambda: None)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


@pytest.fixture
def files(tiny_model: Callable[[Tiny], Path]) -> ModelFiles:
    return resolve_model("tiny", ModelEntry(str(tiny_model(TINY))))


@pytest.fixture
def host(cache_folder: Path) -> Host:
    return Host(1, cache_folder)


def load(files: ModelFiles, host: Host, **options: Any) -> OnnxBackend:
    plain = quick_artifact(files, "onnx", host, fused=False)
    return OnnxBackend(files, plain, host, ProviderOptions(**options))


def test_the_cpu_is_asked_for_unless_another_is_chosen(runtime: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host)
    assert runtime.asked == [["CPUExecutionProvider"]]
    assert (backend.engine.split(", ")[1:], backend.token_budget) == (["fp32", "plain"], 1024)


def test_cuda_computes_in_fp32_without_tf32(runtime: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host, provider="cuda")
    assert runtime.asked[-1] == [(CUDA, {"device_id": "0", "use_tf32": "0"}), "CPUExecutionProvider"]
    assert (backend.engine.split(", ")[1:], backend.token_budget) == (["fp32", "plain", "cuda"], 8192)


@pytest.mark.parametrize("fp16", [False, True])
def test_tensorrt_is_told_shapes_and_where_to_keep_what_it_builds(
    fp16: bool, runtime: Runtime, files: ModelFiles, host: Host
) -> None:
    backend = load(files, host, provider="tensorrt", fp16=fp16)
    (first, options), cuda, cpu = runtime.asked[-1]
    assert (first, cuda[0], cpu) == (TENSORRT, CUDA, "CPUExecutionProvider")
    folder = host.cache / "onnxruntime-tensorrt"
    assert folder.is_dir()
    assert options == {
        "device_id": "0",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_engine_cache_prefix": quick_artifact(files, "onnx", host, fused=False).folder.name,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
        "trt_profile_min_shapes": "input_ids:1x1,token_type_ids:1x1,attention_mask:1x1",
        "trt_profile_opt_shapes": "input_ids:64x64,token_type_ids:64x64,attention_mask:64x64",
        "trt_profile_max_shapes": "input_ids:64x64,token_type_ids:64x64,attention_mask:64x64",
        "trt_fp16_enable": str(int(fp16)),
        "trt_layer_norm_fp32_fallback": str(int(fp16)),
    }
    assert backend.engine.endswith(f"{'fp16' if fp16 else 'fp32'}, plain, tensorrt")


def test_tensorrt_gets_no_more_rows_than_its_engine_is_built_for(
    runtime: Runtime, files: ModelFiles, host: Host
) -> None:
    backend, cpu = load(files, host, provider="tensorrt"), load(files, host)
    texts = ["the text", "word", "a model of query and passage"]
    tokens, rows = backend.tokenize(texts, None), np.arange(150) % 3
    found = backend.finish(backend.forward(tokens, rows), normalize=True)
    assert runtime.runs == [MOST_ROWS, MOST_ROWS, 150 - 2 * MOST_ROWS]
    np.testing.assert_allclose(found, cpu.finish(cpu.forward(tokens, rows), normalize=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("provider", "name"), [("cuda", CUDA), ("tensorrt", TENSORRT)])
def test_a_provider_that_falls_back_is_refused(
    provider: str, name: str, runtime: Runtime, files: ModelFiles, host: Host
) -> None:
    runtime.falls_back = True
    with pytest.raises(WorkerError, match=f"was asked for {name} and runs CPUExecutionProvider: the libraries of CUDA"):
        load(files, host, provider=provider)


def test_a_wheel_without_the_provider_is_refused(files: ModelFiles, host: Host) -> None:
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has it")
    with pytest.raises(
        WorkerError, match=f"has no {CUDA}: pip uninstall onnxruntime, then pip install onnxruntime-gpu"
    ):
        load(files, host, provider="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": "rocm"}, "provider 'rocm' of backend onnx is none of cpu, cuda, tensorrt"),
        ({"provider": "tensorrt", "fp16": "yes"}, "fp16 'yes' of backend onnx is neither true nor false"),
        ({"provider": "cuda", "fp16": True}, "fp16 of backend onnx is for provider tensorrt, not cuda"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str, files: ModelFiles, host: Host) -> None:
    with pytest.raises(SettingsError, match=message):
        load(files, host, **options)


def test_int8_graphs_are_for_cpus() -> None:
    assert OnnxBackend.OPTIONS == ("provider", "fp16")
    assert OnnxInt8Backend.OPTIONS == ()


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
    monkeypatch.setattr(
        backends, "artifact_for", lambda files, kind, host: kinds.append(kind) or quick_artifact(files, "onnx", host)
    )
    with pytest.raises(WorkerError):
        OnnxBackend.load("tiny", ModelEntry(str(files.folder)), Host(1, tmp_path), {"provider": "cuda"})
    OnnxBackend.load("tiny", ModelEntry(str(files.folder)), Host(1, tmp_path), {})
    assert kinds == [recipe.ONNX_PLAIN, recipe.ONNX]


def test_that_graph_is_built_and_measured_as_the_others_are(
    files: ModelFiles, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "run_build", lambda module, request: build.build(request, print))
    artifact = recipe.build_onnx(files, host, BuildOptions({"provider": "cuda"}))
    assert artifact.manifest["recipe"]["kind"] == "onnx-plain"
    assert artifact.manifest["accuracy"]["passed"]
    operators = artifact.manifest["graph"]["operators"]
    assert {"MatMul", "Softmax", "LayerNormalization"} <= set(operators)
    assert {"Attention", "BiasGelu"}.isdisjoint(operators)
    assert (artifact.folder / GRAPH).is_file()


def test_onnxruntime_with_providers_for_gpus_counts_as_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "onnxruntime-gpu":
            raise recipe.metadata.PackageNotFoundError(package)
        return "1.27.0"

    monkeypatch.setattr(recipe.metadata, "version", version)
    assert recipe.onnxruntime_version("a test") == "1.27.0"
    assert providers.NAMES["cpu"] == "CPUExecutionProvider"
