"""TensorRT plans on a stand-in for TensorRT, which executes their graphs on the CPU and is as strict as the real one.

Nothing here was run on a GPU but the test with the mark `tensorrt`, where there is one.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from embedctl_config.errors import DeviceLost, ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_config.wire import ErrorCode
from embedctl_workers.backends.onnx import recipe as onnx_recipe
from embedctl_workers.backends.onnx.inputs import GRAPH
from embedctl_workers.backends.tensorrt import graphs, recipe
from embedctl_workers.backends.tensorrt.backend import TensorRTBackend
from embedctl_workers.backends.tensorrt.profiles import pieces_of, profiles_for
from embedctl_workers.backends.tensorrt.recipe import PLAN, PlanOptions
from embedctl_workers.backends.tensorrt.runtime import CudaDevice, Runtime
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.builders import BuildOptions, load_builder
from embedctl_workers.models.files import ModelFiles
from tests.support.chunks import chunk_of, encode_rows
from tests.support.fakes import tensorrt as fake
from tests.support.fakes.cuda import FakeDevice
from tests.support.onnx_models import spoil
from tests.support.tensorrt_models import TEXTS, TINY, assert_close, by_torch, stand_in
from tests.support.tiny_models import FilesOf, Tiny

pytestmark = pytest.mark.slow

OTHER_FAMILIES = (
    Tiny("roberta", max_seq_length=100, pooling="cls"),
    Tiny("mpnet", max_seq_length=100, pooling="lasttoken+max"),
)
#: Two rows of the longest text at once.
SMALL: dict[str, Any] = {"batch_tokens": 200}
#: For what depends on TensorRT's names; all else is tried with the newer version alone.
BOTH = pytest.mark.parametrize("version", fake.VERSIONS, indirect=True)


@pytest.fixture
def version(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", fake.VERSIONS[-1])


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def here(version: str, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """What a process has that runs on the stand-ins, and builds without processes of its own."""
    return stand_in(version, device, monkeypatch)


@pytest.fixture
def files(files_of: FilesOf) -> ModelFiles:
    return files_of(TINY)


@pytest.fixture
def own(files: ModelFiles, here: Runtime, host: Host, tmp_path: Path) -> Host:
    """A cache of the test's own, with the ONNX graph of the small model and its references in it."""
    graph = onnx_recipe.artifact_for(files, onnx_recipe.ONNX, host)
    shutil.copytree(graph.folder, tmp_path / "artifacts" / graph.folder.name)
    shutil.copytree(host.cache / "references", tmp_path / "references")
    return Host(1, tmp_path)


def load(files: ModelFiles, host: Host, **options: Any) -> TensorRTBackend:
    return TensorRTBackend.load("tiny", ModelEntry(str(files.folder)), host, options)


@pytest.mark.parametrize(
    ("version", "tiny"),
    [*((version, TINY) for version in fake.VERSIONS), *((fake.VERSIONS[-1], tiny) for tiny in OTHER_FAMILIES)],
    indirect=["version"],
    ids=str,
)
def test_vectors_are_those_of_sentence_transformers(tiny: Tiny, here: Runtime, host: Host, files_of: FilesOf) -> None:
    files = files_of(tiny)
    backend = load(files, host, **SMALL)
    assert backend.engine == f"TensorRT {here.version}, fp16, Fake GPU"
    expected = by_torch(files, TEXTS)
    assert (backend.fingerprint, backend.dim, backend.max_tokens) == (files.fingerprint, expected.shape[1], 100)
    for rows in (None, [3, 1], [6, 4, 0, 2, 6]):
        assert_close(encode_rows(backend, TEXTS, rows), expected if rows is None else expected[rows])
    assert_close(encode_rows(backend, TEXTS[:2], prompt="query: "), by_torch(files, TEXTS[:2], prompt="query: "))


@pytest.mark.parametrize(("dtype", "least"), [("fp32", 0.9999999), ("bf16", 0.999)])
def test_another_type_gives_them_too(dtype: str, least: float, here: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host, dtype=dtype, **SMALL)
    assert f", {dtype}," in backend.engine
    assert_close(encode_rows(backend, TEXTS), by_torch(files, TEXTS), least)


def test_a_batch_is_begun_before_the_one_before_it_is_done(here: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host, **SMALL)
    backend.warm_up()
    assert backend.ahead == 1
    tokens = backend.tokenize(TEXTS, None)
    first, second = backend.forward(tokens, np.array([0, 6])), backend.forward(tokens, np.array([2]))
    assert all(begun.vectors.isnan().all() for _, begun in (*first.pieces, *second.pieces))
    expected = by_torch(files, TEXTS)
    assert_close(backend.finish(first, normalize=True), expected[[0, 6]])
    assert all(begun.vectors.isnan().all() for _, begun in second.pieces)
    assert_close(backend.finish(second, normalize=True), expected[[2]])


@pytest.mark.parametrize(
    ("max_tokens", "longest"),
    [(5, [5]), (33, [32, 33]), (384, [32, 64, 128, 256, 384]), (8192, [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192])],
)
def test_profiles_cover_every_length_once(max_tokens: int, longest: list[int]) -> None:
    profiles = profiles_for(max_tokens, 16_384)
    assert [each.longest for each in profiles] == longest
    lengths = {1, 7, 8, 9, *longest, *(each + 1 for each in longest), max_tokens - 1}
    for length in (each for each in lengths if each <= max_tokens):
        (piece,) = pieces_of(profiles, np.array([length]))
        profile = profiles[piece.profile]
        assert max(profile.shortest, length) <= piece.width <= profile.longest
        least, usual, most = profile.shapes
        assert all(a <= b <= c for a, b, c in zip(least, usual, most, strict=True))


def test_pieces_are_within_their_profile_and_hold_every_row_once() -> None:
    profiles = profiles_for(512, 1024)
    lengths = np.random.default_rng(0).integers(1, 513, 300)
    pieces = pieces_of(profiles, lengths)
    assert sorted(np.concatenate([piece.places for piece in pieces]).tolist()) == list(range(300))
    for piece in pieces:
        assert len(piece.places) <= profiles[piece.profile].most
        assert lengths[piece.places].max() <= piece.width < lengths[piece.places].max() + 8


def test_the_manifest_says_what_was_built(here: Runtime, files: ModelFiles, own: Host) -> None:
    build_plan = load_builder("gpu-tensorrt", "tensorrt")
    asked = BuildOptions(SMALL, revision="main")
    artifact = build_plan(files, own, asked)
    assert here.trt._calls["built"] == 1
    manifest = artifact.manifest
    assert set(manifest["files"]) == {"model.json", PLAN, "tokenizer.json"}
    assert manifest["recipe"]["kind"] == "tensorrt"
    assert (manifest["graph"]["name"], manifest["model"]["revision"]) == ("fp16", "main")
    assert manifest["versions"]["tensorrt"] == here.version
    assert manifest["accuracy"]["passed"]
    assert manifest["accuracy"]["bounds"] == {"min_cosine": 0.999}
    assert build_plan(files, own, asked).folder == artifact.folder
    assert here.trt._calls["built"] == 1
    build_plan(files, own, replace(asked, force=True))
    assert here.trt._calls["built"] == 2


def changed_graph(graph: Artifact) -> Artifact:
    files = {name: {**facts, "sha256": "0" * 64} for name, facts in graph.manifest["files"].items() if name == GRAPH}
    return Artifact(graph.folder, {**graph.manifest, "files": {**graph.manifest["files"], **files}})


def test_all_parts_are_in_the_key(here: Runtime, files: ModelFiles, own: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = onnx_recipe.artifact_for(files, onnx_recipe.ONNX, own)
    options = PlanOptions(**SMALL)

    def key(graph: Artifact = graph, version: str = here.version, device: CudaDevice = here.device, **of: Any) -> str:
        at = Runtime(SimpleNamespace(__version__=version), device, here.log)
        return recipe.wanted(of.get("files", files), graph, at, of.get("options", options)).name

    first = key()
    keys = {
        *(key(graph=changed_graph(graph)), key(version="10.16.9.99"), key(files=replace(files, fingerprint="ab" * 32))),
        *(key(device=FakeDevice("Another GPU")), key(device=FakeDevice(capability="9.0"))),
        *(key(options=PlanOptions(batch_tokens=400)), key(options=PlanOptions("fp16", 200))),
    }
    for owner, name, value in (
        (recipe, "BUILDER", "another workspace"),
        (recipe, "CONVERSION", "another"),
        (metadata, "version", lambda package: "0.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys |= {key()}
    assert len(keys) == 10
    assert first not in keys
    assert key() == first


def test_a_plan_that_tensorrt_refuses_is_built_again_once(here: Runtime, files: ModelFiles, own: Host) -> None:
    load(files, own, **SMALL)
    left = [True]
    here.trt._refuses = lambda plan: bool(left) and left.pop()
    assert_close(encode_rows(load(files, own, **SMALL), TEXTS), by_torch(files, TEXTS))
    assert here.trt._calls["built"] == 2

    here.trt._refuses = lambda plan: True
    with pytest.raises(ModelError, match="the plan was built for something else"):
        load(files, own, **SMALL)
    with pytest.raises(ModelError, match=r"--no-build forbids building it: run `embedctl model build .* --force`"):
        load(files, Host(1, own.cache, build=False), **SMALL)


def test_without_building_the_message_says_what_is_missing(here: Runtime, files: ModelFiles, own: Host) -> None:
    no_build = Host(1, own.cache, build=False)
    with pytest.raises(ModelError, match=r"no artefact \w+-tensorrt-\w+ in .* --no-build"):
        load(files, no_build, **SMALL)
    load(files, own, **SMALL)
    assert_close(encode_rows(load(files, no_build, **SMALL), TEXTS), by_torch(files, TEXTS))
    here.device.name = "Another GPU"
    with pytest.raises(ModelError, match=r"no artefact \w+-tensorrt-\w+ in .* --no-build"):
        load(files, no_build, **SMALL)
    with pytest.raises(ModelError, match=r"no artefact \w+-onnx-\w+ in .* --no-build"):
        load(files, Host(1, own.cache / "empty", build=False), **SMALL)


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    types: set[str] = set()
    convert = graphs.convert

    def convert_badly(source: Path, target: Path, dtype: str) -> None:
        convert(source, target, dtype)
        if dtype in types:
            spoil(target)

    monkeypatch.setattr(graphs, "convert", convert_badly)
    return types


def test_bf16_is_taken_where_fp16_fails_the_gate(spoilt: set[str], here: Runtime, files: ModelFiles, own: Host) -> None:
    spoilt.add("fp16")
    backend = load(files, own, **SMALL)
    assert ", bf16," in backend.engine
    assert_close(encode_rows(backend, TEXTS), by_torch(files, TEXTS), 0.999)
    assert here.trt._calls["built"] == 2


def test_a_model_without_a_right_plan_is_refused(spoilt: set[str], here: Runtime, files: ModelFiles, own: Host) -> None:
    spoilt |= {"fp16", "bf16"}
    with pytest.raises(
        ModelError, match=r"no plan reproduces its vectors \(fp16: max abs .*; bf16: max abs .*torch-gpu"
    ):
        load(files, own, **SMALL)
    with pytest.raises(ModelError, match=r"no plan reproduces its vectors \(fp16: max abs [^;]*\): use"):
        load(files, own, dtype="fp16", **SMALL)
    assert not list(own.cache.glob(f"artifacts/*/{PLAN}"))


@BOTH
def test_every_error_of_the_parser_is_told(here: Runtime, plain_graph: Path, tmp_path: Path) -> None:
    model = onnx.load(plain_graph)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    for name in ("BiasGelu", "SkipLayerNormalization"):
        model.graph.node.append(onnx.helper.make_node(name, ["input_ids"], [name], domain="com.microsoft"))
    onnx.save(model, tmp_path / GRAPH)
    told = r"can't read its graph: no importer for BiasGelu; no importer for SkipLayerNormalization"
    with pytest.raises(ModelError, match=told):
        recipe.build_plan(here, tmp_path / GRAPH, profiles_for(32, 64))


def test_a_lost_device_ends_the_process(device: FakeDevice, here: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host, **SMALL)
    tokens = backend.tokenize(TEXTS, None)
    output = backend.forward(tokens, np.arange(2))
    device.broken = True
    with pytest.raises(DeviceLost, match=r"Fake GPU is lost to this process"):
        backend.finish(output, normalize=True)
    with pytest.raises(DeviceLost, match=r"Fake GPU is lost to this process"):
        backend.forward(tokens, np.arange(2))


def test_a_batch_that_fails_is_waited_for(device: FakeDevice, here: Runtime, files: ModelFiles, host: Host) -> None:
    backend = load(files, host, **SMALL)
    device.free = 300  # bytes: less than the tokens of the longer text
    texts = ["the text", "to " * 40]
    with contextlib.suppress(torch.OutOfMemoryError):
        backend.forward(backend.tokenize(texts, None), np.arange(2))
        pytest.fail("there was enough memory")
    encoder = ChunkEncoder(backend, backend.token_budget)
    encoded = encoder.encode(encoder.prepare(chunk_of(*texts), {}))
    assert [(error.row, error.code) for error in encoded.errors] == [(1, ErrorCode.OUT_OF_MEMORY)]
    assert_close(encoded.vectors[:1], by_torch(files, texts[:1]))


@pytest.mark.needs("tensorrt")
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
def test_on_a_gpu_vectors_are_those_of_sentence_transformers(dtype: str, files: ModelFiles, tmp_path: Path) -> None:
    backend = load(files, Host(2, tmp_path), dtype=dtype)
    backend.warm_up()
    expected = by_torch(files, TEXTS)
    for rows in (None, [3, 1], [6, 4, 0, 2, 6]):
        assert_close(encode_rows(backend, TEXTS, rows), expected if rows is None else expected[rows], 0.999)
    again = load(files, Host(2, tmp_path, build=False), dtype=dtype)
    assert_close(encode_rows(again, TEXTS), expected, 0.999)
