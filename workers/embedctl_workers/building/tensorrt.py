"""`python -m embedctl_workers.building.tensorrt REQUEST`: fill a plan's folder. The backend's `recipe` runs this.

This is a separate process, so that a worker does not keep what the builder loads, and a crash of the builder becomes an
error. A plan is kept if its vectors pass the accuracy gate for 16 bits. Progress and result are printed as by
`embedctl_workers.building.onnx`.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.accuracy.report import Report
from embedctl_workers.backends.onnx.export import versions
from embedctl_workers.backends.onnx.graphs import operators_of
from embedctl_workers.backends.onnx.inputs import GRAPH, MODEL, TOKENIZER
from embedctl_workers.backends.tensorrt import graphs
from embedctl_workers.backends.tensorrt import runtime as runtimes
from embedctl_workers.backends.tensorrt.backend import TensorRTBackend
from embedctl_workers.backends.tensorrt.plan import build_plan
from embedctl_workers.backends.tensorrt.recipe import PLAN, SIXTEEN_BITS, PlanOptions, profiles_of
from embedctl_workers.backends.tensorrt.timing import TimingCache
from embedctl_workers.building.manifests import accuracy_of, model_of, rate_of
from embedctl_workers.building.onnx import PACKAGES
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.build_process import answer_request
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import gate_texts

_CLASS = HardwareClass(device="gpu", backend="tensorrt", precision="fp16")
_ROUNDS = 5


def main() -> None:
    """Run the command line."""
    answer_request(build, 'use a class with backend = "torch-gpu"')


def build(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Fill `request["folder"]`, and return the contents of the manifest.

    Raises:
        ModelError: no plan gives the model's vectors.
        MissingExtra, WorkerError: TensorRT or the GPU is missing or unusable.
    """
    builder = _Builder(request, say)
    asked = builder.options.dtype
    folder = Path(request["folder"])
    failed = []
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        for dtype in SIXTEEN_BITS if asked == "auto" else (asked,):
            made = Path(scratch) / dtype
            made.mkdir()
            report, facts = builder.build(dtype, made)
            say(f"{dtype}: {report.figures}")
            if report.passed:
                for name in (PLAN, MODEL, TOKENIZER):
                    shutil.move(made / name, folder / name)
                return facts
            failed.append(f"{dtype}: {report.figures}")
    raise ModelError(f'no plan reproduces its vectors ({"; ".join(failed)}): use a class with backend = "torch-gpu"')


class _Builder:
    def __init__(self, request: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.options = PlanOptions(**request["options"])
        self._files = ModelFiles(request["name"], Path(request["source"]), request["fingerprint"])
        self._host = Host(request["threads"], Path(request["cache"]))
        self._graph = Path(request["graph"])
        self._say = say
        self._runtime = runtimes.open_runtime()

    def build(self, dtype: str, folder: Path) -> tuple[Report, dict[str, Any]]:
        """Fill a folder with a plan in a type; its accuracy report, and the contents of its manifest."""
        self._say(f"converting the graph to {dtype}")
        graphs.convert(self._graph / GRAPH, folder / GRAPH, dtype)
        self._say(f"building a plan in {dtype}, which takes minutes")
        timing = TimingCache(self._runtime, self._host.cache)
        plan = build_plan(self._runtime, folder / GRAPH, profiles_of(self._graph, self.options), timing)
        (folder / PLAN).write_bytes(plan)
        for name in (MODEL, TOKENIZER):
            shutil.copy(self._graph / name, folder / name)
        artifact = Artifact(folder, {"graph": {"name": dtype}})
        backend = TensorRTBackend(self._files, artifact, self._runtime, self._host, self.options)
        backend.warm_up()
        encoder = ChunkEncoder(backend, backend.token_budget)
        report = measure_backend(encoder, _CLASS, self._host)
        assert report is not None
        texts_per_s = self._texts_per_s(backend) if report.passed else 0.0
        operators = operators_of(folder / GRAPH)
        attention = attention_of(operators.get("Softmax", 0), backend.fused_attention)
        self._say(f"attention: {attention}")
        backend.close()
        return report, {
            "model": model_of(self._files),
            "engine": backend.engine,
            "built": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                **versions(*PACKAGES),
                "tensorrt": self._runtime.version,
            },
            "graph": {"name": dtype, "attention": attention, "operators": operators},
            "accuracy": accuracy_of(report),
            "rate": {**rate_of(backend, texts_per_s, self._host.threads), "device": self._runtime.device.name},
        }

    def _texts_per_s(self, backend: TensorRTBackend) -> float:
        """The rate of the gate's texts in one batch: the best of a few rounds."""
        tokens = backend.tokenize(gate_texts(), None)
        rows = np.arange(len(tokens.lengths))
        best = 0.0
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            backend.finish(backend.forward(tokens, rows), normalize=True)
            best = max(best, len(rows) / (time.perf_counter() - started))
        return best


def attention_of(layers: int, fused: Sequence[int] | None) -> str:
    """The manifest's entry about attention.

    Args:
        layers: the graph's number of attention layers.
        fused: the number of fused kernels in each profile; None if it is unknown.
    """
    if fused is None:
        return f"unknown for {layers} layers: TensorRT's inspector does not say"
    fewest, most = min(fused), max(fused)
    counts = str(fewest) if fewest == most else f"{fewest} to {most}"
    return f"fused in {counts} of {layers} layers" + ("" if fewest == most else ", by profile")


if __name__ == "__main__":
    main()
