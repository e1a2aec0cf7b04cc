"""Loads a plan and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embedctl_config.errors import ModelError
from embedctl_workers.backends.onnx.inputs import OUTPUT, Batch
from embedctl_workers.backends.tensorrt.profiles import Profile
from embedctl_workers.backends.tensorrt.runtime import Runtime


class PlanRefused(ModelError):
    """Raised when TensorRT does not load a plan."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A piece of a batch that was handed to the device.

    `vectors`, float32, rows × dim, in host memory, are complete when the stream has come this far. Until then the
    device reads and writes the tensors in `held`.
    """

    vectors: torch.Tensor
    held: Sequence[torch.Tensor]


class LoadedPlan:
    """A plan on the device, with a context for each of its profiles.

    The contexts share one block of scratch memory, as large as the largest needs: their work is done in one stream, and
    so one after the other.

    The plan must have been built here, or its sha256 checked: any other may crash the process, or worse. If it can't be
    loaded, or has other profiles, PlanRefused is raised.
    """

    def __init__(self, runtime: Runtime, plan: bytes, profiles: Sequence[Profile]) -> None:
        trt = runtime.trt
        self._runtime = runtime
        # The vendor's objects don't keep each other alive: the engine needs the loader, and the contexts the engine.
        self._loader = trt.Runtime(runtime.log)
        try:
            engine = self._loader.deserialize_cuda_engine(plan)
        except RuntimeError as error:
            raise PlanRefused(f"TensorRT {runtime.version} does not load the plan: {error}") from error
        if engine is None:
            raise PlanRefused(f"TensorRT {runtime.version} does not load the plan: {runtime.last_errors}")
        self._engine = engine
        if engine.num_optimization_profiles != len(profiles):
            raise PlanRefused(f"the plan has {engine.num_optimization_profiles} profiles, not {len(profiles)}")
        names = [engine.get_tensor_name(at) for at in range(engine.num_io_tensors)]
        self.inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        for name in names:
            kind = trt.DataType.INT64 if name in self.inputs else trt.DataType.FLOAT
            if engine.get_tensor_dtype(name) != kind:
                raise PlanRefused(f"the plan's tensor {name} is of {engine.get_tensor_dtype(name)}, not {kind}")
        if [name for name in names if name not in self.inputs] != [OUTPUT]:
            raise PlanRefused(f"the plan's tensors are {', '.join(names)}")
        with runtime.device.current():
            size = int(engine.device_memory_size_v2)
            self._scratch = runtime.device.scratch(size) if size else None
            self._contexts = [self._context(at) for at in range(len(profiles))]
        runtime.device.wait()

    def begin(self, profile: int, batch: Batch) -> Begun:
        """Hand the device a piece of a batch, in shapes that the profile takes. The device's stream must be current.

        A RuntimeError if the device does not take it, a MemoryError if it has no memory for it.
        """
        context, device = self._contexts[profile], self._runtime.device
        held = []
        for name in self.inputs:
            tensor = device.put(np.ascontiguousarray(batch[name], np.int64))
            self._check(context.set_input_shape(name, tuple(tensor.shape)), f"the shape {tuple(tensor.shape)}")
            self._check(context.set_tensor_address(name, tensor.data_ptr()), f"the address of {name}")
            held.append(tensor)
        if missing := context.infer_shapes():
            raise RuntimeError(f"TensorRT lacks the shapes or addresses of {', '.join(missing)}")
        shape = tuple(context.get_tensor_shape(OUTPUT))
        self._check(min(shape) > 0, f"a graph whose vectors are of shape {shape}")
        output = device.empty(shape)
        self._check(context.set_tensor_address(OUTPUT, output.data_ptr()), f"the address of {OUTPUT}")
        self._check(context.execute_async_v3(device.stream), "the batch")
        return Begun(device.fetch(output), [*held, output])

    def _context(self, profile: int) -> Any:
        # With TensorRT's own strategy, each context would have a block as large as the largest profile needs.
        strategy = self._runtime.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise MemoryError(f"TensorRT makes no context for profile {profile}: {self._runtime.last_errors}")
        chosen = context.set_optimization_profile_async(profile, self._runtime.device.stream)
        self._check(chosen, f"profile {profile}")
        if self._scratch is not None:
            context.set_device_memory(self._scratch.data_ptr(), self._scratch.nbytes)
        return context

    def _check(self, done: bool, what: str) -> None:
        if done:
            return
        errors = self._runtime.last_errors
        # If the error killed the device's context, this raises too. Otherwise it was an error of the batch.
        self._runtime.device.wait()
        if "out of memory" in errors.lower():
            raise MemoryError(f"TensorRT has no memory for {what}: {errors}")
        raise RuntimeError(f"TensorRT does not take {what}: {errors}")
