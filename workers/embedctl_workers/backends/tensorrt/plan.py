"""Builds a plan from a graph: the form that TensorRT runs, for one kind of GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedctl_config.errors import ModelError
from embedctl_workers.backends.tensorrt.profiles import Profile
from embedctl_workers.backends.tensorrt.runtime import Runtime

#: Memory that a layer may use for intermediate results (bytes).
_WORKSPACE_BYTES = 4 << 30
#: How plans are built: part of a plan's key.
BUILDER = f"strongly typed, no TF32, workspace {_WORKSPACE_BYTES}"


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
