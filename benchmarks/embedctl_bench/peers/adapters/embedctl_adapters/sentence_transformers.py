"""sentence-transformers on torch, onnxruntime or OpenVINO, in a precision or at its default. It sorts by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from .serving import Vectors

#: Precisions by torch's and by OpenVINO's names.
_FLOATS = {"float32": "fp32", "f32": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16"}
_KINDS = {**_FLOATS, "i8": "int8", "u8": "int8"}
#: Instruction sets, by Linux's names, without which bf16 is emulated on a CPU and takes many times as long as fp32.
_BF16 = {"amx_bf16", "avx512_bf16", "bf16"}


class SentenceTransformersAdapter:
    """`SentenceTransformer.encode`.

    Attributes:
        computes: the precision that was read back from the loaded model; empty for onnxruntime, which has none.
    """

    def __init__(
        self,
        model: Path,
        threads: int,
        backend: Any = "torch",
        file: str = "",
        device: str = "cpu",
        dtype: str = "",
        hint: str = "f32",
    ) -> None:
        """Load it; raises RuntimeError if the CPU has no instructions for this precision.

        Args:
            file: the ONNX graph in the model's folder.
            dtype: the precision by torch's name; empty for torch's default.
            hint: the precision by OpenVINO's name; empty for OpenVINO's default.
        """
        if dtype == "bfloat16" and device == "cpu" and not _BF16 & _cpu_flags():
            raise RuntimeError("this CPU has no instructions for bf16")
        torch.set_num_threads(threads)
        options: dict[str, Any] = {}
        if backend == "onnx":
            options = _onnx(threads, file)
        elif backend == "openvino":
            precision = {"INFERENCE_PRECISION_HINT": hint} if hint else {}
            options = {"ov_config": {**precision, "INFERENCE_NUM_THREADS": str(threads)}}
        elif dtype:
            options = {"dtype": getattr(torch, dtype)}
        self._model: Any = SentenceTransformer(str(model), device=device, backend=backend, model_kwargs=options)
        inner: Any = self._model[0].auto_model
        self.computes = _openvino_computes(inner) if backend == "openvino" else ""
        if backend == "torch":
            self.computes = _KINDS[str(next(inner.parameters()).dtype).removeprefix("torch.")]

    def encode(self, texts: Sequence[str], batch: int) -> Vectors:
        """As its users call it."""
        vectors = self._model.encode(list(texts), batch_size=batch, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, np.float32)

    def count(self, texts: Sequence[str]) -> int:
        """By its own tokenizer."""
        return int(self._model.tokenize(list(texts))["attention_mask"].sum())


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def _onnx(threads: int, file: str) -> dict[str, Any]:
    import onnxruntime

    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = threads
    return {"provider": "CPUExecutionProvider", "session_options": session, "file_name": f"onnx/{file}"}


def _openvino_computes(model: Any) -> str:
    """The precision in which the compiler computes most linear layers, and in how many of them."""
    model.compile()
    kinds = [
        facts["runtimePrecision"].astype(str)
        for facts in (node.get_rt_info() for node in model.request.get_runtime_model().get_ordered_ops())
        if facts["layerType"].astype(str) == "FullyConnected"
    ]
    kind, count = Counter(_KINDS.get(kind, kind) for kind in kinds).most_common(1)[0]
    return f"{kind} ({count} of {len(kinds)} linear layers)"
