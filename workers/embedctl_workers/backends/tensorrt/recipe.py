"""The plan that a machine runs: its recipe, and how it is found or built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embedctl_config.errors import ModelError, SettingsError
from embedctl_workers.backends.onnx import recipe as onnx_recipe
from embedctl_workers.backends.onnx.inputs import ModelFacts
from embedctl_workers.backends.onnx.recipe import ONNX, OWN
from embedctl_workers.backends.tensorrt import runtime as runtimes
from embedctl_workers.backends.tensorrt.profiles import Profile, profiles_for
from embedctl_workers.backends.tensorrt.runtime import Runtime
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact, Wanted
from embedctl_workers.models.build_process import found_or_built, require
from embedctl_workers.models.builders import USUAL, BuildOptions
from embedctl_workers.models.files import ModelFiles

#: Memory that a layer may use for intermediate results (bytes).
_WORKSPACE_BYTES = 4 << 30
#: How plans are built: part of a plan's key.
BUILDER = f"strongly typed, no TF32, workspace {_WORKSPACE_BYTES}"
#: The kind of artefact. The backend that runs it has the same name.
TENSORRT = "tensorrt"
#: The artefact's file with the plan, beside the model's facts and its tokenizer.
PLAN = "model.plan"
#: The types that a plan may compute in. `auto`: the first of the 16-bit types whose vectors pass the gate.
DTYPES = ("auto", "fp16", "bf16", "fp32")
SIXTEEN_BITS = ("fp16", "bf16")
#: The version of the conversion, part of a plan's key: change it if the same graph would be converted differently.
CONVERSION = "2"
_FEWEST_BATCH_TOKENS, _MOST_BATCH_TOKENS = 64, 1 << 20


def build_plan(runtime: Runtime, graph: Path, profiles: Sequence[Profile]) -> bytes:
    """Build a plan of a graph that already has the types to compute in; a ModelError where TensorRT can't."""
    trt = runtime.trt
    builder = trt.Builder(runtime.log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, runtime.log)
    if not parser.parse_from_file(str(graph)):
        errors = "; ".join(str(parser.get_error(at)) for at in range(parser.num_errors))
        raise ModelError(f"TensorRT {runtime.version} can't read its graph: {errors or runtime.last_errors}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
    config.clear_flag(trt.BuilderFlag.TF32)
    for profile in profiles:
        _add_profile(runtime, builder, network, config, profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ModelError(f"TensorRT {runtime.version} can't build a plan of its graph: {runtime.last_errors}")
    return bytes(plan)


def _add_profile(runtime: Runtime, builder: Any, network: Any, config: Any, profile: Profile) -> None:
    shapes = builder.create_optimization_profile()
    for at in range(network.num_inputs):
        shapes.set_shape(network.get_input(at).name, *profile.shapes)
    if config.add_optimization_profile(shapes) < 0:
        raise ModelError(
            f"TensorRT {runtime.version} does not take the shapes {profile} of its graph: {runtime.last_errors}"
        )


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a hardware class whose backend is `tensorrt`.

    `dtype` is one of :data:`DTYPES`, `batch_tokens` the tokens of a usual batch, padding included.
    """

    dtype: str = "auto"
    batch_tokens: int = 16_384

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype {self.dtype!r} of backend tensorrt is none of {', '.join(DTYPES)}")
        whole = isinstance(self.batch_tokens, int) and not isinstance(self.batch_tokens, bool)
        if not whole or not _FEWEST_BATCH_TOKENS <= self.batch_tokens <= _MOST_BATCH_TOKENS:
            raise SettingsError(
                f"batch_tokens {self.batch_tokens!r} of backend tensorrt is not a whole number from "
                f"{_FEWEST_BATCH_TOKENS} to {_MOST_BATCH_TOKENS}"
            )


def profiles_of(folder: Path, options: PlanOptions) -> list[Profile]:
    return profiles_for(ModelFacts.read(folder).max_tokens, options.batch_tokens)


def wanted(files: ModelFiles, graph: Artifact, runtime: Runtime, options: PlanOptions) -> Wanted:
    """The plan that this GPU runs of a plain ONNX graph; MissingExtra if onnxruntime, which converts it, is missing."""
    return Wanted(
        files.fingerprint,
        {
            "kind": TENSORRT,
            "graph": _digest(graph),
            "conversion": CONVERSION,
            "onnxruntime": onnx_recipe.onnxruntime_version("backend 'tensorrt'"),
            "tensorrt": runtime.version,
            "gpu": runtime.device.name,
            "compute_capability": runtime.device.capability,
            "profiles": "; ".join(map(str, profiles_of(graph.folder, options))),
            "dtype": options.dtype,
            "builder": BUILDER,
        },
    )


def artifact_for(
    files: ModelFiles, runtime: Runtime, host: Host, options: PlanOptions, how: BuildOptions = USUAL
) -> Artifact:
    """A plan, as :func:`found_or_built`, and the graph that it is built of."""
    graph = onnx_recipe.artifact_for(files, ONNX, host, BuildOptions(revision=how.revision))
    want, ready = wanted(files, graph, runtime, options), partial(require, "tensorrt", "onnx", "sentence_transformers")
    more = {"graph": str(graph.folder), "options": asdict(options)}
    return found_or_built(files, want, host, how, ready, **more)


def build(files: ModelFiles, host: Host, how: BuildOptions) -> Artifact:
    """See :class:`embedctl_workers.models.builders.Builder`."""
    if how.target:
        raise SettingsError(f"a plan is built for the GPU at hand: leave --target {how.target} out")
    if how.exporter != OWN:
        raise SettingsError(
            f"plans are built from the graph of the exporter {OWN}: leave --exporter {how.exporter} out"
        )
    chosen = PlanOptions(**how.options)
    return artifact_for(files, runtimes.open_runtime(), host, chosen, how)


def _digest(graph: Artifact) -> str:
    """sha256 over the files of a graph, including its weights and its tokenizer."""
    files = {name: facts["sha256"] for name, facts in graph.manifest["files"].items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
