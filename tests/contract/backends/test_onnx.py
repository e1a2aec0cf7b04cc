"""ONNX graphs: those of the model, never built or run where they are wrong; and what a GPU's provider is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import pytest
import sentence_transformers

from embedctl_config.errors import DeviceLost, MissingExtra, ModelError, WorkerError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.backends.onnx import export, recipe
from embedctl_workers.backends.onnx.backend import OnnxBackend
from embedctl_workers.backends.onnx.inputs import GRAPH
from embedctl_workers.backends.onnx.providers import CPU
from embedctl_workers.building import onnx as build
from embedctl_workers.machine.host import Host
from embedctl_workers.models import build_process
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.build_process import request_for, run_build
from embedctl_workers.models.builders import BuildOptions
from embedctl_workers.models.files import ModelFiles, resolve_model
from tests.support.builds_here import build_here
from tests.support.chunks import encode_rows
from tests.support.onnx_models import quick_artifact, spoil
from tests.support.references_here import by_torch
from tests.support.tiny_models import FilesOf, MakeModel, Tiny

TINY = Tiny(normalize=True)


@pytest.fixture
def files(files_of: FilesOf) -> ModelFiles:
    return files_of(TINY)


@pytest.fixture(scope="module")
def built(tiny_model: MakeModel, host: Host) -> dict[str, Artifact]:
    files = resolve_model("tiny", ModelEntry(str(tiny_model(TINY))))
    with pytest.MonkeyPatch.context() as patch:
        build_here(patch)
        return {kind: recipe.artifact_for(files, kind, host) for kind in recipe.KINDS}


@pytest.mark.slow
def test_a_manifest_says_what_was_built_and_how_good_it_is(built: dict[str, Artifact], files: ModelFiles) -> None:
    manifest = built["onnx"].manifest
    assert manifest["fingerprint"] == files.fingerprint
    assert manifest["model"]["source"] == str(files.folder)
    assert {"torch", "transformers", "onnx", "onnxruntime"} <= set(manifest["versions"])
    assert manifest["accuracy"]["passed"]
    assert manifest["accuracy"]["max_abs_error"] <= 1e-4
    assert manifest["accuracy"]["min_cosine"] <= manifest["accuracy"]["mean_cosine"]
    assert manifest["graph"]["operators"]["MatMul"] > 0
    assert set(manifest["files"]) == {"model.json", "model.onnx", "tokenizer.json"}
    small = built["onnx-int8"].manifest
    assert small["engine"].startswith("onnxruntime ")
    assert "int8" in small["engine"]
    assert small["recipe"]["weights"] in ("7 bits", "8 bits")
    assert any("Quantize" in operator for operator in small["graph"]["operators"])
    assert small["accuracy"]["max_abs_error"] > manifest["accuracy"]["max_abs_error"]
    assert small["accuracy"]["bounds"] == {"min_cosine": 0.95, "mean_cosine": 0.98}


def test_a_prompt_left_out_and_weights_by_place_are_refused_together(files_of: FilesOf, tmp_path: Path) -> None:
    tiny = Tiny(pooling="weightedmean", prompt="query: ", include_prompt=False)
    files = files_of(tiny)
    with pytest.raises(ModelError, match='use a class with backend = "torch"'):
        export.export_own(files, tmp_path)


def requested(files: ModelFiles, folder: Path, kind: str, host: Host) -> Mapping[str, Any]:
    folder.mkdir()
    return request_for(files, host, kind, folder, exporter="own")


def test_a_bad_graph_is_refused(files: ModelFiles, tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def export_badly(files: ModelFiles, folder: Path) -> None:
        export.export_own(files, folder)
        spoil(folder / GRAPH)

    build_here(monkeypatch)
    monkeypatch.setattr(build, "EXPORTERS", {"own": export_badly})
    with pytest.raises(ModelError, match='use a class with backend = "torch"'):
        build.build(requested(files, tmp_path / "new", "onnx-int8", host), print)
    assert list((tmp_path / "new").iterdir()) == []


FAILING = """
from embedctl_workers.models.build_process import answer_request
def build(request, say):
    say("at work")
    raise KeyError("no such layer")
answer_request(build, "use another class")
"""


def test_a_childs_error_is_said(files: ModelFiles, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = r"model 'tiny' can't be built as onnx: KeyError: 'no such layer'; use another class"
    with pytest.raises(ModelError, match=told):
        run_build("failing", request_for(files, host, "onnx", tmp_path))


@pytest.mark.parametrize(
    ("exporter", "package", "extra"),
    [("own", "sentence_transformers", "torch"), ("own", "onnx", "onnx"), ("optimum", "optimum", "optimum")],
)
def test_building_says_which_extra_is_missing(
    files: ModelFiles, tmp_path: Path, exporter: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    for module in (recipe, build_process):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MissingExtra, match=rf"pip install 'embedctl\[{extra}\]'"):
        recipe.artifact_for(files, "onnx", Host(1, tmp_path), BuildOptions(exporter=exporter))


@pytest.mark.parametrize(
    ("machine", "flags", "reduced"),
    [
        ("x86_64", "sse4_2 avx2", True),
        ("x86_64", "avx2 avx512f avx512bw", True),
        ("x86_64", "avx2 avx_vnni", False),
        ("x86_64", "avx512f avx512_vnni", False),
        ("aarch64", "asimd asimddp", False),
    ],
)
def test_a_bit_of_the_weights_is_left_unused_where_sums_would_overflow(
    files: ModelFiles, machine: str, flags: str, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(recipe, "cpu_flags", lambda: frozenset(flags.split()))
    assert recipe.reduced_range() is reduced
    assert recipe.wanted(files, "onnx-int8").recipe["weights"] == ("7 bits" if reduced else "8 bits")
    assert "weights" not in recipe.wanted(files, "onnx").recipe


RUN = """
import json, sys
for name in ("torch", "transformers", "sentence_transformers", "onnx"):
    sys.modules[name] = None  # importing it fails
from pathlib import Path
from embedctl_config.hardware import ModelEntry
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Host
import numpy as np

source, cache, kind = sys.argv[1:]
host = Host(1, Path(cache), build=False)
backend = load_backend(kind, "tiny", entry=ModelEntry(source), host=host, options={})
backend.warm_up()
tokens = backend.tokenize(["the text", "word"], None)
vectors = backend.finish(backend.forward(tokens, np.arange(2)), normalize=True)
print(json.dumps([vectors.tolist(), backend.engine, backend.dim]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", recipe.KINDS)
def test_what_is_built_runs_without_torch(built: dict[str, Artifact], files: ModelFiles, host: Host, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(files.folder), str(host.cache), kind],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    vectors, engine, dim = json.loads(done.stdout)
    assert (engine, dim) == (built[kind].manifest["engine"], 32)
    cosines = (np.array(vectors) * by_torch(files.folder, ["the text", "word"])).sum(axis=1)
    assert (cosines > (0.999999 if kind == "onnx" else 0.9)).all()


def test_the_session_has_the_threads_that_it_is_given(files: ModelFiles, host: Host) -> None:
    backend = OnnxBackend(files, quick_artifact(files, "onnx", host), Host(2, host.cache))
    assert backend._session is not None
    options = backend._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    backend.close()
    with pytest.raises(ModelError, match="was closed"):
        encode_rows(backend, ["a"])


def test_a_killed_build_leaves_nothing(files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ModelError, match="the process that builds it died"):
        recipe.artifact_for(files, "onnx", Host(1, tmp_path))
    assert [path for path in (tmp_path / "artifacts").iterdir() if path.is_dir()] == []


def test_another_onnxruntime_is_another_artefact(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    here = recipe.wanted(files, "onnx")
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    assert recipe.wanted(files, "onnx").name != here.name


CUDA = "CUDAExecutionProvider"


# With a provider for a GPU. None is used: sessions are onnxruntime's own on the CPU, which says that it has what it is
# asked for.


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


def load(files: ModelFiles, host: Host, provider: str = CPU) -> OnnxBackend:
    return OnnxBackend(files, quick_artifact(files, "onnx", host), host, provider)


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


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", True),
        ("CUDA failure 2: out of memory ; GPU=0", False),
        ("Failed to allocate memory for requested buffer of size 42", False),
        ("Non-zero status code returned while running Gather node", False),
    ],
)
def test_a_lost_gpu_is_no_bad_batch(error: str, lost: bool, runtime: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host, provider="cuda")
    runtime.fails = RuntimeError(error)
    tokens = backend.tokenize(["word"], None)
    with pytest.raises(DeviceLost if lost else RuntimeError, match=error.partition(":")[0]) as raised:
        backend.forward(tokens, np.arange(1))
    assert isinstance(raised.value, DeviceLost) is lost


def test_onnxruntime_with_providers_for_gpus_counts_as_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "onnxruntime-gpu":
            raise metadata.PackageNotFoundError(package)
        return "1.27.0"

    monkeypatch.setattr(metadata, "version", version)
    assert recipe.onnxruntime_version("a test") == "1.27.0"


def test_a_build_imports_nothing_that_the_release_for_optimum_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has sentence-transformers: to import it takes another one ten seconds."""
    monkeypatch.delattr(sentence_transformers, "MultiVectorEncoder")
    lacking = {name: None for name in sys.modules if "multi_vector" in name}
    with patch.dict(sys.modules, lacking):
        for name in [each for each in sys.modules if each.partition(".")[0] == "embedctl_workers"]:
            del sys.modules[name]
        importlib.import_module("embedctl_workers.building.onnx")
