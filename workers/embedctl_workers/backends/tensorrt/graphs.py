"""Converts a plain fp32 graph to the types to compute in. TensorRT uses these types as they are.

Everything after the first weight is converted to 16 bits, with exceptions: sums, norms and powers, and pooling with
everything after it, stay in fp32. So does everything that depends only on ids and masks (positions, terms added to
scores).

Attention is put into the form that TensorRT runs as one kernel: the query is scaled before the first product, and
nothing but the mask stands between the products and the softmax. A cast to fp32 around the softmax would prevent it.

"TensorRT requires Q or K to be multiplied with attention scale … before going into … the first Batched Matrix Multiply"
(NVIDIA's page "Fused Attention"). The exporter scales the product.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel

from embedctl_config.errors import ModelError
from embedctl_workers.backends.onnx.graphs import is_large

#: What stands between a projection and the product: it moves numbers, and changes none.
_MOVES = ("Transpose", "Reshape")
#: Sums and powers overflow in fp16 (NVIDIA/TensorRT#2564, #1196, #3101). Softmax does not: it subtracts the maximum.
_IN_FP32 = [*DEFAULT_OP_BLOCK_LIST, "LayerNormalization", "ReduceMean", "Pow"]
#: Nodes of the modules after the transformer, as our exporter names them.
_BEHIND = re.compile(r"/_model\.[1-9]")
#: Masks a score, in place of a number that 16 bits can't hold: large enough that the score's exponential vanishes.
_MASKED = 1e4
_LARGEST = float(np.finfo(np.float16).max)
_WEIGHTS = "weights"


def scale_queries(graph: Any) -> None:
    """Move each scale of scores into the weight and the bias of the query, or else to the query itself.

    A scale that is a power of two (heads of 16, 64 or 256) changes no bit in fp32 and bf16. Any other rounds each
    number once more, in fp32. The graph's constants must be initializers.
    """
    view = _View(graph)
    for softmax in [node for node in graph.node if node.op_type == "Softmax"]:
        scaling = view.scaling_of(softmax.input[0])
        if scaling is not None:
            _move(view, scaling)


class _View:
    """The makers and users of a graph's numbers."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.makers = {output: node for node in graph.node for output in node.output}
        self.weights = {each.name: each for each in graph.initializer}
        self.users: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)

    def scaling_of(self, scores: str) -> Any:
        """The node that multiplies a product by a constant, before masks are added to it; None if there is none."""
        node = self.makers.get(scores)
        if node is None:
            return None
        if node.op_type == "Add":
            found = (self.scaling_of(name) for name in node.input)
            return next((each for each in found if each is not None), None)
        if node.op_type not in ("Mul", "Div") or self.factor(node) is None:
            return None
        product = self.makers.get(self.scaled(node))
        if product is None or product.op_type != "MatMul" or self.weights.keys() & set(product.input):
            return None
        return node if len(self.users[product.output[0]]) == 1 else None

    def scaled(self, node: Any) -> str:
        """The input of a scaling that is no constant."""
        return next((name for name in node.input if name not in self.weights), "")

    def factor(self, node: Any) -> np.float32 | None:
        """The number that a node multiplies by; None if that is no single constant."""
        at = 1 if node.op_type == "Div" else next((at for at in (0, 1) if node.input[at] in self.weights), 1)
        tensor = self.weights.get(node.input[at])
        if tensor is None or int(np.prod(tensor.dims)) != 1:
            return None
        value = np.float32(numpy_helper.to_array(tensor).reshape(()))
        return np.float32(1 / np.float64(value)) if node.op_type == "Div" else value

    def projection(self, query: str) -> list[Any] | None:
        """The product with a weight, and the addition of a bias if there is one, that alone make a query."""
        nodes: list[Any] = []
        while (node := self.makers.get(query)) is not None and len(self.users[query]) == 1:
            if node.op_type in _MOVES:
                query = node.input[0]
                continue
            constant = [name for name in node.input if name in self.weights]
            if node.op_type not in ("Add", "MatMul") or len(constant) != 1:
                return None
            nodes.append(node)
            if node.op_type == "MatMul":
                return nodes if node.input[1] in self.weights else None
            query = next(name for name in node.input if name not in self.weights)
        return None


def _move(view: _View, scaling: Any) -> None:
    product = view.makers[view.scaled(scaling)]
    for user in view.users[scaling.output[0]]:
        OnnxModel.replace_node_input(user, scaling.output[0], product.output[0])
    factor, nodes = view.factor(scaling), view.projection(product.input[0])
    if nodes is None:
        OnnxModel.replace_node_input(scaling, product.output[0], product.input[0])
        product.input[0] = scaling.output[0]
        return
    view.graph.node.remove(scaling)
    for node in nodes:
        name = next(each for each in node.input if each in view.weights)
        # Equal tensors may be shared between layers, so the scaled one is a new one.
        scaled = numpy_helper.to_array(view.weights[name]) * factor
        view.graph.initializer.append(numpy_helper.from_array(scaled.astype(np.float32), f"{node.name}/scaled"))
        OnnxModel.replace_node_input(node, name, f"{node.name}/scaled")


def convert(source: Path, target: Path, dtype: str) -> None:
    """Write a graph, of the kind :data:`~embedctl_workers.backends.onnx.recipe.ONNX`, in another type.

    Args:
        target: a file in another folder.
        dtype: `fp16`, `bf16`, or `fp32`, which changes only the numbers that mask.

    Raises:
        ModelError: the graph's nodes do not have our exporter's names.
    """
    large = is_large(source)
    model = _loaded(source)
    if dtype != "fp32":
        model = _to_fp16(model, target.parent, large=large)
    if dtype == "bf16":
        _to_bf16(model.graph, _loaded(source).graph)
    _save(model, target, large=large)


def _loaded(source: Path) -> Any:
    """The graph, with only operators and types that TensorRT has."""
    model = onnx.load(source)
    graph = model.graph
    _constants_to_initializers(graph)
    _bound_masks(graph)
    _settle_squeezes(graph)
    _count_in_fp32(graph)
    _drop_idle_casts(graph)
    scale_queries(graph)
    _drop_unused(graph)
    return _sorted(model)


def _constants_to_initializers(graph: Any) -> None:
    """Turn constants of nodes into initializers, because only for these the conversion knows the type of each use."""
    others = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            _add_initializer(graph, node.attribute[0].t, node.output[0])
        else:
            others.append(node)
    _replace(graph.node, others)


def _bound_masks(graph: Any) -> None:
    for tensor in graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if not (np.abs(values) <= _LARGEST).all():
            bounded = np.where(np.abs(values) <= _LARGEST, values, np.sign(values) * np.float32(_MASKED))
            tensor.CopyFrom(numpy_helper.from_array(bounded.astype(np.float32), tensor.name))


def _settle_squeezes(graph: Any) -> None:
    """Drop the test whether a dimension is 1, always true: TensorRT wants branches of equal rank."""
    for node in graph.node:
        if node.op_type != "If":
            continue
        (then,) = (each.g for each in node.attribute if each.name == "then_branch")
        found = {each.op_type: each for each in then.node}
        if set(found) == {"Constant", "Squeeze"}:
            squeeze = onnx.NodeProto()
            squeeze.CopyFrom(found["Squeeze"])
            squeeze.output[0] = node.output[0]
            _add_initializer(graph, found["Constant"].attribute[0].t, squeeze.input[1])
            node.CopyFrom(squeeze)


def _count_in_fp32(graph: Any) -> None:
    """Cast cumulative sums of integers to fp32, exact for any text's tokens: TensorRT sums no integers."""
    kinds = {node.output[0]: _cast_to(node) for node in graph.node}
    for node in list(graph.node):
        kind = kinds.get(node.input[0]) if node.op_type == "CumSum" else None
        if kind in (TensorProto.INT32, TensorProto.INT64):
            whole, name = node.input[0], node.name
            counted = node.output[0]
            node.input[0], node.output[0] = f"{name}_of", f"{name}_is"
            before = helper.make_node("Cast", [whole], [f"{name}_of"], f"{name}_before", to=TensorProto.FLOAT)
            after = helper.make_node("Cast", [f"{name}_is"], [counted], f"{name}_after", to=kind)
            graph.node.extend([before, after])


def _drop_idle_casts(graph: Any) -> None:
    """Drop casts of a softmax to fp32, which it already is: some models name the type in which it is computed."""
    same = {node.output[0]: node.output[0] for node in graph.node if node.op_type == "Softmax"}
    for node in graph.node:
        if _cast_to(node) == TensorProto.FLOAT and node.input[0] in same:
            same[node.output[0]] = same[node.input[0]]
    _rename_inputs(graph, same)


def _to_fp16(model: Any, folder: Path, *, large: bool) -> Any:
    behind = [node.name for node in model.graph.node if _BEHIND.match(node.name)]
    if not behind:
        raise ModelError("its graph has no nodes with the names of pooling: was it made by another exporter?")
    weighted = _behind_weights(model.graph)
    before = [node.name for node in model.graph.node if node.name not in weighted]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Through a file, so that types are inferred for graphs above 2 GiB too.
        whole = Path(scratch) / "whole.onnx"
        _save(model, whole, large=large)
        converted = convert_float_to_float16(
            str(whole), keep_io_types=True, op_block_list=_IN_FP32, node_block_list=[*before, *behind]
        )
    _drop_repeated(converted.graph)
    _drop_round_trips(converted.graph)
    _drop_unused(converted.graph)
    return _sorted(converted)


def _behind_weights(graph: Any) -> set[str]:
    """The names of the nodes whose numbers depend on a weight, in a topologically sorted graph."""
    dependent = {each.name for each in graph.initializer if each.data_type == TensorProto.FLOAT and len(each.dims) > 1}
    names = set()
    for node in graph.node:
        if node.op_type not in ("Shape", "Size") and dependent.intersection(node.input):
            names.add(node.name)
            dependent.update(node.output)
    return names


def _drop_repeated(graph: Any) -> None:
    """Drop duplicates: the conversion adds the same cast again for each fp32 node that uses a number."""
    _replace(graph.node, list({node.output[0]: node for node in graph.node}.values()))
    _replace(graph.value_info, list({value.name: value for value in graph.value_info}.values()))


def _drop_round_trips(graph: Any) -> None:
    """Drop casts to fp16 and back: the conversion puts them between fp32 nodes, which loses the precision of fp32."""
    makers = {output: node for node in graph.node for output in node.output}
    kinds = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    same: dict[str, str] = {}
    outputs = {each.name for each in graph.output}
    for node in graph.node:
        maker = makers.get(node.input[0]) if _cast_to(node) == TensorProto.FLOAT else None
        if maker is not None and _cast_to(maker) == TensorProto.FLOAT16:
            node.input[0] = maker.input[0]
            if kinds.get(maker.input[0]) == TensorProto.FLOAT and node.output[0] not in outputs:
                same[node.output[0]] = maker.input[0]
    _rename_inputs(graph, same)


def _drop_unused(graph: Any) -> None:
    while True:
        used = {name for node in graph.node for name in node.input} | {each.name for each in graph.output}
        kept = [node for node in graph.node if used.intersection(node.output)]
        if len(kept) == len(graph.node):
            break
        _replace(graph.node, kept)
    made = {name for node in graph.node for name in node.output}
    _replace(graph.initializer, [each for each in graph.initializer if each.name in used])
    _replace(graph.value_info, [each for each in graph.value_info if each.name in made])


def _to_bf16(graph: Any, fp32: Any) -> None:
    """Replace fp16 by bf16 throughout a graph, with numbers rounded from the fp32 graph's."""
    originals = {each.name: each for each in fp32.initializer}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            values = numpy_helper.to_array(originals[tensor.name])
            tensor.CopyFrom(_bf16(values, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
            elif attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT16:
                attribute.t.CopyFrom(_bf16(numpy_helper.to_array(attribute.t).astype(np.float32), attribute.t.name))
    for value in chain(graph.value_info, graph.input, graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16


def _bf16(values: Any, name: str) -> Any:
    """Each value rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return helper.make_tensor(name, TensorProto.BFLOAT16, values.shape, rounded.tobytes(), raw=True)


def _cast_to(node: Any) -> int | None:
    return int(node.attribute[0].i) if node.op_type == "Cast" else None


def _add_initializer(graph: Any, tensor: Any, name: str) -> None:
    added = graph.initializer.add()
    added.CopyFrom(tensor)
    added.name = name


def _rename_inputs(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = names.get(name, name)


def _replace(field: Any, kept: list[Any]) -> None:
    del field[:]
    field.extend(kept)


def _sorted(model: Any) -> Any:
    ordered = OnnxModel(model)
    ordered.topological_sort()
    return ordered.model


def _save(model: Any, target: Path, *, large: bool) -> None:
    onnx.save_model(model, target, save_as_external_data=large, location=_WEIGHTS if large else None)
