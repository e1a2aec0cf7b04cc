"""Scales attention's queries instead of its scores, which TensorRT asks for.

"TensorRT requires Q or K to be multiplied with attention scale … before going into … the first Batched Matrix Multiply"
(NVIDIA's page "Fused Attention"). The exporter scales the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper
from onnxruntime.transformers.onnx_model import OnnxModel

#: What stands between a projection and the product: it moves numbers, and changes none.
_MOVES = ("Transpose", "Reshape")


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
