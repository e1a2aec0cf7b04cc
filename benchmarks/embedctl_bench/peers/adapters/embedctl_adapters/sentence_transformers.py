"""sentence-transformers on torch, onnxruntime or OpenVINO. It sorts by length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from .serving import Vectors


class SentenceTransformersAdapter:
    """`SentenceTransformer.encode`; `file` is the ONNX graph in the model's folder, `dtype` a name of torch's."""

    def __init__(
        self, model: Path, threads: int, backend: Any = "torch", file: str = "", device: str = "cpu", dtype: str = ""
    ) -> None:
        torch.set_num_threads(threads)
        options = _options(backend, threads, file)
        if dtype:
            options["dtype"] = getattr(torch, dtype)
        self._model: Any = SentenceTransformer(str(model), device=device, backend=backend, model_kwargs=options)

    def encode(self, texts: Sequence[str], batch: int) -> Vectors:
        """As its users call it."""
        vectors = self._model.encode(list(texts), batch_size=batch, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, np.float32)

    def count(self, texts: Sequence[str]) -> int:
        """By its own tokenizer."""
        return int(self._model.tokenize(list(texts))["attention_mask"].sum())


def _options(backend: str, threads: int, file: str) -> dict[str, Any]:
    if backend == "onnx":
        return _onnx(threads, file)
    return _openvino(threads) if backend == "openvino" else {}


def _onnx(threads: int, file: str) -> dict[str, Any]:
    import onnxruntime

    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = threads
    return {"provider": "CPUExecutionProvider", "session_options": session, "file_name": f"onnx/{file}"}


def _openvino(threads: int) -> dict[str, Any]:
    # If the CPU has bfloat16, OpenVINO uses it by default.
    return {"ov_config": {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads)}}
