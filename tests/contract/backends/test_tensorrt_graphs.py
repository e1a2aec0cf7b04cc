"""The graphs that TensorRT is given: their types, and that they give the model's vectors in them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from embedctl_config.hardware import ModelEntry
from embedctl_workers.backends.onnx.export import export_own
from embedctl_workers.backends.onnx.inputs import GRAPH, OUTPUT, GraphInputs
from embedctl_workers.backends.tensorrt import graphs
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import resolve_model
from tests.support.fakes.tensorrt import fusible
from tests.support.tensorrt_models import TEXTS, assert_close, by_torch
from tests.support.tiny_models import MakeModel, Tiny

pytestmark = pytest.mark.slow

Exported = MakeModel
BERT, MPNET = Tiny(normalize=True), Tiny("mpnet", normalize=True)


@pytest.fixture(scope="module")
def exported(tiny_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Exports a small model, once; the folder of its graph."""

    @functools.cache
    def export(tiny: Tiny) -> Path:
        folder = tmp_path_factory.mktemp("exported")
        export_own(resolve_model("tiny", ModelEntry(str(tiny_model(tiny)))), folder)
        return folder

    return export


def types_of(model: Any) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    graph = inferred.graph
    found = {each.name: each.type.tensor_type.elem_type for each in (*graph.value_info, *graph.input, *graph.output)}
    return found | {each.name: each.data_type for each in graph.initializer}


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_sums_norms_and_pooling_stay_in_fp32(dtype: str, kind: int, plain_graph: Path, tmp_path: Path) -> None:
    graphs.convert(plain_graph, tmp_path / GRAPH, dtype)
    model = onnx.load(tmp_path / GRAPH)
    onnx.checker.check_model(model, full_check=True)
    types = types_of(model)
    assert types[OUTPUT] == TensorProto.FLOAT
    inputs = {
        name: {types[each] for node in model.graph.node if node.op_type == name for each in node.input if each}
        for name in ("LayerNormalization", "MatMul", "Erf")
    }
    assert inputs == {"LayerNormalization": {TensorProto.FLOAT}, "MatMul": {kind}, "Erf": {kind}}
    behind = [node for node in model.graph.node if node.name.startswith("/_model.1/")]
    assert {"ReduceSum", "Div"} <= {node.op_type for node in behind}
    allowed = {TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL}
    assert {types[each] for node in behind for each in (*node.input, *node.output) if each} <= allowed
    other = {TensorProto.FLOAT16, TensorProto.BFLOAT16} - {kind}
    assert other.isdisjoint(types.values())


@pytest.mark.parametrize(("tiny", "dtype"), [(BERT, "fp16"), (MPNET, "bf16")], ids=str)
def test_a_graph_computed_in_its_own_types_gives_the_vectors(
    tiny: Tiny, dtype: str, tmp_path: Path, exported: Exported, tiny_model: MakeModel
) -> None:
    """By onnx's own evaluator, which computes in fp16 and bf16 where the graph says so."""
    from onnx.reference import ReferenceEvaluator

    plain = exported(tiny)
    graphs.convert(plain / GRAPH, tmp_path / GRAPH, dtype)
    evaluator = ReferenceEvaluator(str(tmp_path / GRAPH))
    inputs = GraphInputs(plain, evaluator.input_names, Host(1, tmp_path))
    tokens = inputs.tokenize(TEXTS, None)
    (found,) = evaluator.run(None, dict(inputs.batch(tokens, np.arange(len(TEXTS)))))
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert_close(found, by_torch(resolve_model("tiny", ModelEntry(str(tiny_model(tiny)))), TEXTS), 0.999)


@pytest.mark.parametrize(
    ("tiny", "operator", "dtype"), [(Tiny("roberta"), "CumSum", "bf16"), (MPNET, "Log", "fp16")], ids=str
)
def test_positions_stay_in_fp32(tiny: Tiny, operator: str, dtype: str, tmp_path: Path, exported: Exported) -> None:
    """bf16 holds whole numbers up to 256 alone."""
    graphs.convert(exported(tiny) / GRAPH, tmp_path / GRAPH, dtype)
    model = onnx.load(tmp_path / GRAPH)
    types, makers = types_of(model), {name: node for node in model.graph.node for name in node.output}
    (found,) = (node for node in model.graph.node if node.op_type == operator)
    before, seen = [found.input[0]], set()
    while before:
        name = before.pop()
        seen.add(types[name])
        if makers[name].op_type != "Shape":
            before += [each for each in makers[name].input if each in makers]
    assert types[found.output[0]] == TensorProto.FLOAT
    assert {TensorProto.FLOAT16, TensorProto.BFLOAT16}.isdisjoint(seen)
    (after,) = (node for node in model.graph.node if found.output[0] in node.input)
    assert types[after.output[0]] in (TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64)


@pytest.mark.parametrize(("tiny", "dtype"), [(BERT, "fp32"), (MPNET, "bf16"), (Tiny("modernbert"), "fp16")], ids=str)
def test_attention_is_in_the_form_that_is_fused(tiny: Tiny, dtype: str, tmp_path: Path, exported: Exported) -> None:
    """Nothing but sums of masks stands between the first product and the softmax, nor between that and the second."""
    graphs.convert(exported(tiny) / GRAPH, tmp_path / GRAPH, dtype)
    model = onnx.load(tmp_path / GRAPH)
    onnx.checker.check_model(model, full_check=True)
    assert len(fusible(model.graph)) == tiny.layers == sum(node.op_type == "Softmax" for node in model.graph.node)
    assert not fusible(onnx.load(exported(tiny) / GRAPH).graph)


def test_the_first_token_is_taken_without_a_question(tmp_path: Path, exported: Exported) -> None:
    """The exporter's `If` has answers of several ranks, which TensorRT does not take."""
    plain = exported(Tiny(pooling="cls"))
    assert "If" in {node.op_type for node in onnx.load(plain / GRAPH).graph.node}
    for dtype in ("fp16", "fp32"):
        graphs.convert(plain / GRAPH, tmp_path / GRAPH, dtype)
        assert "If" not in {node.op_type for node in onnx.load(tmp_path / GRAPH).graph.node}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_no_number_of_a_graph_is_beyond_16_bits(dtype: str, plain_graph: Path, tmp_path: Path) -> None:
    def largest(path: Path) -> float:
        tensors = [numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer]
        constants = [
            numpy_helper.to_array(a.t) for node in onnx.load(path).graph.node for a in node.attribute if a.HasField("t")
        ]
        return max(
            float(np.abs(each.astype(np.float64)).max())
            for each in (*tensors, *constants)
            if each.dtype.kind not in "iub"
        )

    assert largest(plain_graph) > 1e30, "the model masks with something else: this test shows nothing"
    graphs.convert(plain_graph, tmp_path / GRAPH, dtype)
    assert largest(tmp_path / GRAPH) == 1e4 if dtype != "bf16" else abs(largest(tmp_path / GRAPH) - 1e4) < 64


def test_a_large_graph_has_weights_apart(plain_graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "is_large", lambda graph: True)
    for dtype in ("bf16", "fp32"):
        (tmp_path / dtype).mkdir()
        graphs.convert(plain_graph, tmp_path / dtype / GRAPH, dtype)
        assert sorted(path.name for path in (tmp_path / dtype).iterdir()) == [GRAPH, "weights"]
        small = tmp_path / f"{dtype}.onnx"
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "is_large", lambda graph: False)
            graphs.convert(plain_graph, small, dtype)
        beside = {each.name: each for each in onnx.load(tmp_path / dtype / GRAPH).graph.initializer}
        for each in onnx.load(small).graph.initializer:
            np.testing.assert_array_equal(numpy_helper.to_array(each), numpy_helper.to_array(beside[each.name]))
