"""Convert a model to another format: `python -m embedctl_adapters.convert FORMAT SOURCE TARGET`.

Each format is converted in the environment of a system that reads it, so its libraries are imported only then.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any


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


def openvino(source: Path, target: Path, *, int8: bool = False) -> None:
    """Write the graph in fp32, or in int8, beside the model's own files."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(source), device="cpu", backend="openvino", model_kwargs={"export": True})
    if int8:
        _quantize(model)
    model.save_pretrained(str(target))


def _quantize(model: Any) -> None:
    """What `export_static_quantized_openvino_model` does by default, but that has its 128 texts from a hub: these are
    paragraphs of Python's manual, none of which is in a workload."""
    from pydoc_data.topics import topics

    from nncf import Dataset
    from optimum.intel import OVConfig, OVQuantizationConfig, OVQuantizer

    texts = [" ".join(block.split()) for topic in topics.values() for block in topic.split("\n\n") if " " in block]
    encode = partial(model.tokenizer, padding="max_length", max_length=384, truncation=True, return_tensors="np")
    samples = Dataset([dict(encode(text)) for text in texts[:: len(texts) // 128][:128]])
    config = OVConfig(quantization_config=OVQuantizationConfig())
    OVQuantizer.from_pretrained(model.transformers_model).quantize(samples, ov_config=config)


if __name__ == "__main__":
    known = {"ctranslate2": ctranslate2, "onnx": onnx, "openvino": openvino}
    known["openvino-int8"] = partial(openvino, int8=True)
    known[sys.argv[1]](*map(Path, sys.argv[2:]))
