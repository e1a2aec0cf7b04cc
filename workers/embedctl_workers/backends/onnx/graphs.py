"""Work on an exported graph: quantising its weights, and counting its operators."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

#: If a graph exceeds this (bytes), its weights go to a file beside it: Protobuf's limit is 2 GiB.
_MOST_IN_ONE_FILE = 1_800_000_000


def quantize(graph: Path, target: Path, *, reduce_range: bool) -> None:
    """Write the graph with int8 weights, quantised per channel; activations are quantised dynamically."""
    quantize_dynamic(
        graph,
        target,
        per_channel=True,
        reduce_range=reduce_range,
        weight_type=QuantType.QInt8,
        use_external_data_format=is_large(graph),
        # An exporter may write operators of which onnx does not know the types of outputs.
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )


def operators_of(graph: Path) -> dict[str, int]:
    """The counts of a graph's operators."""
    model = onnx.load(graph, load_external_data=False)
    return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))


def is_large(graph: Path) -> bool:
    """Whether the files in a graph's folder are together too large for a single file."""
    return sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file()) > _MOST_IN_ONE_FILE
