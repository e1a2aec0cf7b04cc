"""Stands in for NVIDIA's `tensorrt`: a plan holds the ONNX graph, which onnxruntime executes on the CPU.

Made from ../vendor/tensorrt-*.json: it has no class, method, argument or member that the real one of that version
lacks. It is stricter than the real one: types in a graph must fit, shapes lie within the profile, addresses be those of
memory of the device, of the right type and size. What ought to crash a process ends the test. bf16 is computed in fp32,
from numbers that were rounded to bf16. Nothing that runs on it says anything of TensorRT or a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, numpy_helper

from tests.support.fakes.cuda import FakeDevice, alive
from tests.support.fakes.recorded import make_class, make_enumeration

VENDOR = Path(__file__).resolve().parent.parent / "vendor"
VERSIONS = ("10.16", "11.4")
#: The memory that a context needs for intermediate results, for its largest profile.
SCRATCH_BYTES = 4096
_MAGIC = b"stand-in for a plan\n"


class Crash(BaseException):
    """Raised where the real package ends the process."""


def record_of(version: str) -> dict[str, Any]:
    """What was recorded of a version."""
    record: dict[str, Any] = json.loads((VENDOR / f"tensorrt-{version}.json").read_text(encoding="utf-8"))
    return record


def load(version: str, device: FakeDevice) -> ModuleType:
    """The package, of a version, on a device.

    Its `calls` counts plans that were built. Those that `refuses` says yes to are not loaded.
    """
    record = record_of(version)
    module = _Module("tensorrt")
    vars(module)["__version__"] = record["version"]
    module._device = device
    module._calls = {"built": 0}
    module._refuses = lambda plan: False
    behaviours = _behaviours(module)
    for name, each in record["classes"].items():
        if "members" in each:
            setattr(module, name, make_enumeration(name, each))
        else:
            setattr(module, name, make_class(name, each, behaviours.get(name, object)))
    return module


class _Module(ModuleType):
    _device: FakeDevice
    _calls: dict[str, int]
    _refuses: Callable[[bytes], bool]


def _behaviours(trt: Any) -> Mapping[str, type]:
    """What the classes do. Public names are the vendor's; they are checked when the classes are made."""
    device: FakeDevice = trt._device

    class Logger:
        def __init__(self) -> None:
            pass

        def log(self, severity: Any, msg: str) -> None:
            raise NotImplementedError

    def tell(logger: Any, message: str) -> None:
        logger.log(trt.ILogger.Severity.ERROR, message)

    class Memory:
        _content: bytes

        @property
        def nbytes(self) -> int:
            return len(self._content)

        def __bytes__(self) -> bytes:
            return self._content

    def memory(content: bytes) -> Any:
        made = trt.IHostMemory.__new__(trt.IHostMemory)
        made._content = content
        return made

    def new(name: str, /, **state: Any) -> Any:
        made = getattr(trt, name).__new__(getattr(trt, name))
        for key, value in state.items():
            setattr(made, f"_{key}", value)
        return made

    class Builder:
        def __init__(self, logger: Any) -> None:
            if not isinstance(logger, trt.ILogger):
                raise TypeError("no logger")
            self._logger = logger

        def create_network(self, flags: int = 0) -> Any:
            assert flags == 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
            return new("INetworkDefinition", model=None)

        def create_builder_config(self) -> Any:
            return new("IBuilderConfig", profiles=[], tf32=True, workspace=None)

        def create_optimization_profile(self) -> Any:
            return new("IOptimizationProfile", shapes={})

        def build_serialized_network(self, network: Any, config: Any) -> Any:
            model = network._model
            inputs = [each.name for each in model.graph.input]
            if not config._profiles or any(set(each) != set(inputs) for each in config._profiles):
                tell(self._logger, "every input needs a shape in every profile")
                return None
            assert config._workspace is not None
            assert not config._tf32
            trt._calls["built"] += 1
            header = {"version": trt.__version__, "gpu": device.name, "profiles": config._profiles}
            return memory(_MAGIC + json.dumps(header).encode() + b"\n" + model.SerializeToString())

    class Network:
        _model: Any

        @property
        def num_inputs(self) -> int:
            return len(self._model.graph.input)

        def get_input(self, index: int) -> Any:
            return new("ITensor", name=self._model.graph.input[index].name)

    class Tensor:
        _name: str

        @property
        def name(self) -> str:
            return self._name

    class Parser:
        def __init__(self, network: Any, logger: Any) -> None:
            self._network, self._logger = network, logger
            self._errors: list[Any] = []

        def parse_from_file(self, model: str) -> bool:
            try:
                onnx.checker.check_model(model, full_check=True)
                loaded = onnx.load(model)
            except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
                self._errors = [str(error).partition("\n")[0], "and so on"]
                return False
            self._errors = sorted(set(_unsupported(loaded)))
            self._network._model = loaded
            return not self._errors

        @property
        def num_errors(self) -> int:
            return len(self._errors)

        def get_error(self, index: int) -> Any:
            return self._errors[index]

    class Config:
        _profiles: list[Any]

        def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
            assert pool is trt.MemoryPoolType.WORKSPACE
            self._workspace = pool_size

        def clear_flag(self, flag: Any) -> None:
            assert flag is trt.BuilderFlag.TF32
            self._tf32 = False

        def add_optimization_profile(self, profile: Any) -> int:
            self._profiles.append(profile._shapes)
            return len(self._profiles) - 1

    class Profile:
        _shapes: dict[str, Any]

        def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:  # noqa: A002  (the vendor's names)
            if not all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
                raise ValueError("the shapes are not in order")
            self._shapes[input] = [list(min), list(opt), list(max)]

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
            plan = bytes(serialized_engine)
            if not plan.startswith(_MAGIC):
                raise Crash("bytes that are no plan")
            header, model = plan.removeprefix(_MAGIC).split(b"\n", 1)
            facts = json.loads(header)
            if (facts["version"], facts["gpu"]) != (trt.__version__, device.name) or trt._refuses(plan):
                tell(self._logger, "the plan was built for something else")
                return None
            graph = onnx.ModelProto.FromString(model)
            session = _session(graph)
            (trial,) = session.run(None, {each.name: np.ones((1, 8), np.int64) for each in graph.graph.input})
            state = {
                "profiles": facts["profiles"],
                "session": session,
                "dim": trial.shape[1],
                "loader": self,
            }
            return new("ICudaEngine", graph=graph, **state)

    class Engine:
        _graph: Any
        _dim: int
        _profiles: list[dict[str, Any]]

        @property
        def num_optimization_profiles(self) -> int:
            return len(self._profiles)

        @property
        def num_io_tensors(self) -> int:
            return len(self._values())

        def get_tensor_name(self, index: int) -> str:
            return str(self._values()[index].name)

        def get_tensor_mode(self, name: str) -> Any:
            known = {each.name for each in self._graph.graph.input}
            return trt.TensorIOMode.INPUT if name in known else trt.TensorIOMode.OUTPUT

        def get_tensor_dtype(self, name: str) -> Any:
            (kind,) = (each.type.tensor_type.elem_type for each in self._values() if each.name == name)
            return {TensorProto.INT64: trt.DataType.INT64, TensorProto.FLOAT: trt.DataType.FLOAT}[kind]

        @property
        def device_memory_size_v2(self) -> int:
            return SCRATCH_BYTES

        def create_execution_context(self, strategy: Any = None) -> Any:
            assert device.is_current, "a context made outside of the stream"
            managed = strategy is trt.ExecutionContextAllocationStrategy.USER_MANAGED
            own = None if managed else device.scratch(SCRATCH_BYTES)
            return new("IExecutionContext", engine=self, profile=None, shapes={}, addresses={}, scratch=own)

        def _values(self) -> list[Any]:
            return [*self._graph.graph.input, *self._graph.graph.output]

    class Context:
        _engine: Any
        _profile: int | None
        _shapes: dict[str, tuple[int, ...]]
        _addresses: dict[str, int]
        _scratch: Any

        def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
            assert stream_handle == device.stream
            self._profile = profile_index
            return 0 <= profile_index < len(self._engine._profiles)

        def set_device_memory(self, memory: int, size: int) -> None:
            assert size >= SCRATCH_BYTES
            assert self._profile is not None, "the profile was chosen after the memory"
            self._scratch = device.tensor_at(memory)

        def set_input_shape(self, name: str, shape: Any) -> bool:
            assert self._profile is not None, "no profile was chosen"
            least, _, most = self._engine._profiles[self._profile][name]
            fits = len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
            if not fits:
                tell(self._engine._loader._logger, f"{shape} is not within {least} and {most}")
                return False
            self._shapes[name] = tuple(shape)
            return True

        def infer_shapes(self) -> list[str]:
            return [each.name for each in self._engine._graph.graph.input if each.name not in self._shapes]

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            if name in self._shapes:
                return self._shapes[name]
            return (next(iter(self._shapes.values()))[0], self._engine._dim)

        def set_tensor_address(self, name: str, memory: int) -> bool:
            self._addresses[name] = memory
            return True

        def execute_async_v3(self, stream_handle: int) -> bool:
            assert stream_handle == device.stream
            assert self._scratch is not None, "no memory for intermediate results"
            if device.broken:
                tell(self._engine._loader._logger, "Error Code 1: Cuda Runtime (an illegal memory access)")
                return False
            assert not self.infer_shapes()
            assert len(set(self._shapes.values())) == 1, "inputs of several shapes"
            names = [each.name for each in self._engine._values()]
            tensors = {name: device.tensor_at(self._addresses[name]) for name in names}
            for name, reference in tensors.items():
                tensor = alive(reference)
                wanted = torch.int64 if name in self._shapes else torch.float32
                assert tensor.dtype == wanted, f"{name} is {tensor.dtype}"
                assert tensor.is_contiguous()
                assert tuple(tensor.shape) == self.get_tensor_shape(name), f"{name} is of shape {tensor.shape}"
            session = self._engine._session

            def run() -> None:
                feeds = {name: alive(tensors[name]).numpy() for name in names[:-1]}
                for mask in (feeds[name] for name in feeds if name.endswith("mask")):
                    assert np.isin(mask, (0, 1)).all()
                (output,) = session.run(None, feeds)
                alive(tensors[names[-1]]).copy_(torch.from_numpy(output))

            device.ask(run)
            return True

    return {
        "Builder": Builder,
        "IBuilderConfig": Config,
        "ICudaEngine": Engine,
        "IExecutionContext": Context,
        "IHostMemory": Memory,
        "ILogger": Logger,
        "INetworkDefinition": Network,
        "IOptimizationProfile": Profile,
        "ITensor": Tensor,
        "OnnxParser": Parser,
        "Runtime": Runtime,
    }


def fusible(graph: Any) -> list[Any]:
    """The softmaxes of attention in the form of NVIDIA's page "Fused Attention": scaled before the first product."""
    makers = {name: node for node in graph.node for name in node.output}

    def product(name: str) -> bool:
        node = makers.get(name)
        return node is not None and (
            node.op_type == "MatMul" or (node.op_type == "Add" and any(map(product, node.input)))
        )

    return [
        node
        for node in graph.node
        if node.op_type == "Softmax"
        and product(node.input[0])
        and all(each.op_type == "MatMul" for each in graph.node if node.output[0] in each.input)
    ]


def _unsupported(model: Any) -> Iterator[str]:
    """What the real parser has no importer for: operators, and types of their first input."""
    known = json.loads((VENDOR / "tensorrt-operators.json").read_text(encoding="utf-8"))["operators"]
    inferred = onnx.shape_inference.infer_shapes(model).graph
    kinds = {each.name: each.type.tensor_type.elem_type for each in (*inferred.value_info, *inferred.input)}
    kinds |= {each.name: each.data_type for each in inferred.initializer}
    for node in inferred.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in known:
            yield f"no importer for {node.op_type}"
        elif node.input and (kind := TensorProto.DataType.Name(kinds[node.input[0]])) not in known[node.op_type]:
            yield f"no importer for {node.op_type} of {kind}"


def _session(model: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        without_bf16(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def without_bf16(model: Any) -> Any:
    """The graph with fp32 wherever it has bf16, which onnxruntime does not compute in on a CPU."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in copy.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
    del copy.graph.value_info[:]
    return copy
