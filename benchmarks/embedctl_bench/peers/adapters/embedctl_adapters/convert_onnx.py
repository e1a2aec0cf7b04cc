"""Convert a model to ONNX with optimum: fp32, fp32 with fused operators, and int8."""

from __future__ import annotations

import sys
from pathlib import Path

from sentence_transformers import (
    SentenceTransformer,
    export_dynamic_quantized_onnx_model,
    export_optimized_onnx_model,
)


def main() -> None:
    """Write `onnx/model.onnx`, `onnx/model_O2.onnx` and `onnx/model_qint8_….onnx`."""
    source, target = sys.argv[1:]
    model = SentenceTransformer(source, device="cpu", backend="onnx", model_kwargs={"export": True})
    model.save_pretrained(target)
    export_optimized_onnx_model(model, "O2", target)
    export_dynamic_quantized_onnx_model(model, "avx512_vnni", target)
    for graph in Path(target, "onnx").glob("model_qint8_*.onnx"):
        graph.rename(graph.with_name("model_qint8.onnx"))


if __name__ == "__main__":
    main()
