"""Convert a model to another format: `python -m embedctl_adapters.convert FORMAT SOURCE TARGET`.

Each format is converted in the environment of a system that reads it, so its libraries are imported only then.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def ctranslate2(source: Path, target: Path) -> None:
    """Write the weights in fp32, which it quantises as it loads, and the model's files that our wrapper reads."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(source)).convert(str(target))
    for name in ("tokenizer.json", "sentence_bert_config.json"):
        shutil.copy(source / name, target)
    shutil.copytree(source / "1_Pooling", target / "1_Pooling")


def onnx(source: Path, target: Path) -> None:
    """Write `onnx/model.onnx` in fp32, `onnx/model_O2.onnx` with fused operators, and `onnx/model_qint8.onnx`."""
    from sentence_transformers import (
        SentenceTransformer,
        export_dynamic_quantized_onnx_model,
        export_optimized_onnx_model,
    )

    model = SentenceTransformer(str(source), device="cpu", backend="onnx", model_kwargs={"export": True})
    model.save_pretrained(str(target))
    export_optimized_onnx_model(model, "O2", str(target))
    export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(target))
    for graph in (target / "onnx").glob("model_qint8_*.onnx"):
        graph.rename(graph.with_name("model_qint8.onnx"))


def openvino(source: Path, target: Path) -> None:
    """Write the graph in fp32 beside the model's own files."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(source), device="cpu", backend="openvino", model_kwargs={"export": True})
    model.save_pretrained(str(target))


if __name__ == "__main__":
    {"ctranslate2": ctranslate2, "onnx": onnx, "openvino": openvino}[sys.argv[1]](*map(Path, sys.argv[2:]))
