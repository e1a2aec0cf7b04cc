"""`python -m embedctl_workers.building.onnx REQUEST`: fill an artefact's folder. The backend's `recipe` runs this.

This is a separate process, so that a worker never holds torch. Each candidate graph goes through the accuracy gate, and
the fastest one that passes is kept. Progress goes to standard output. The last line there is a JSON object: the
contents of the manifest, or `error`.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl_config.cpu import cpu_flags
from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.accuracy.report import Report
from embedctl_workers.arrays.batching import batches_of
from embedctl_workers.backends.onnx import graphs
from embedctl_workers.backends.onnx.backend import OnnxBackend, OnnxInt8Backend
from embedctl_workers.backends.onnx.export import EXPORTERS
from embedctl_workers.backends.onnx.inputs import GRAPH, MODEL, TOKENIZER
from embedctl_workers.backends.onnx.recipe import ONNX_INT8, ONNX_PLAIN, reduced_range
from embedctl_workers.building.manifests import accuracy_of, origin_of, report_of
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.build_process import answer_request, read_request
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import gate_texts
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET

_FP32 = HardwareClass(backend="onnx")
_INT8 = HardwareClass(backend=ONNX_INT8, precision="int8")
_ROUNDS = 5
#: The plain graph is preferred if it is faster by this factor: less is noise.
_MIN_SPEEDUP = 1.05
#: The instruction sets that decide the speed.
_SPEED_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")
#: The packages that affect a graph.
PACKAGES = ("onnx", "onnxruntime", "optimum", "optimum-onnx")


@dataclass(slots=True)
class Candidate:
    """A graph that was loaded and measured."""

    name: str
    folder: Path
    backend: OnnxBackend
    report: Report
    texts_per_s: float = 0.0


def main() -> None:
    answer_request(build, 'use a class with backend = "torch"')


def build(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Fill `request["folder"]`, and return the manifest's contents; a ModelError if no graph gives its vectors."""
    files, host, folder = read_request(request)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        builder = _Builder(files, host, Path(scratch), say)
        best = builder.best(request["kind"], request["exporter"])
        best.backend.close()
        for path in best.folder.iterdir():
            shutil.move(path, folder / path.name)
    return {**origin_of(request, files, best.backend.engine, *PACKAGES), **builder.facts(best, folder)}


class _Builder:
    def __init__(self, files: ModelFiles, host: Host, scratch: Path, say: Any) -> None:
        self._files = files
        self._host = host
        self._scratch = scratch
        self._say = say

    def best(self, kind: str, exporter: str) -> Candidate:
        """The fastest of the graphs that give the model's vectors."""
        plain = self._new("plain")
        self._say(f"exporting with {exporter} exporter")
        exported = EXPORTERS[exporter](self._files, plain)
        folders = [plain]
        fused = self._new("fused")
        if kind != ONNX_PLAIN and graphs.fuse(plain / GRAPH, exported, fused / GRAPH):
            self._copy_facts(plain, fused)
            folders.insert(0, fused)
        self._say("comparing with torch")
        candidates = [self._candidate(folder, OnnxBackend, _FP32) for folder in folders]
        right = [each for each in candidates if each.report.passed]
        if not right:
            raise ModelError(
                f"its ONNX graph does not reproduce its vectors ({candidates[-1].report.figures}): "
                'use a class with backend = "torch"'
            )
        if kind != ONNX_INT8:
            return self._fastest(right)
        self._say("quantising")
        for each in candidates:
            each.backend.close()  # quantising alone takes several times the model's size
        small = []
        for each in right:
            folder = self._new(f"{each.name} int8")
            graphs.quantize(each.folder / GRAPH, folder / GRAPH, reduce_range=reduced_range())
            self._copy_facts(plain, folder)
            small.append(self._candidate(folder, OnnxInt8Backend, _INT8))
        passed = [each for each in small if each.report.passed]
        if not passed:
            self._say("warning: int8 is not accurate enough for this model, and a worker's gate will refuse it")
        return self._fastest(passed or small)

    def facts(self, best: Candidate, folder: Path) -> dict[str, Any]:
        """The manifest's entries about the graph, and what was measured of it."""
        return {
            "cpu": {"machine": platform.machine(), "flags": [flag for flag in _SPEED_FLAGS if flag in cpu_flags()]},
            "graph": {"name": best.name.partition(" ")[0], **graphs.describe(folder / GRAPH)},
            "accuracy": accuracy_of(best.report),
        }

    def _candidate(self, folder: Path, kind: type[OnnxBackend], hardware: HardwareClass) -> Candidate:
        name = folder.name
        artifact = Artifact(folder, {"graph": {"name": name.partition(" ")[0]}})
        backend = kind(self._files, artifact, self._host)
        report = report_of(backend, hardware, self._host)
        self._say(f"{name}: {report.figures}")
        return Candidate(name, folder, backend, report)

    def _fastest(self, candidates: list[Candidate]) -> Candidate:
        """The first, unless another is clearly faster; measured in turn, because other work comes and goes."""
        self._say("measuring")
        for candidate in candidates * _ROUNDS:
            backend = candidate.backend
            tokens = backend.tokenize(gate_texts(), None)
            started = time.perf_counter()
            for batch in batches_of(tokens.lengths, DEFAULT_TOKEN_BUDGET, backend.batch_cost):
                backend.forward(tokens, batch)
            rate = len(tokens.lengths) / (time.perf_counter() - started)
            candidate.texts_per_s = max(candidate.texts_per_s, rate)
        best = candidates[0]
        for candidate in candidates[1:]:
            if candidate.texts_per_s > best.texts_per_s * _MIN_SPEEDUP:
                best = candidate
        shown = ", ".join(f"{each.name} {each.texts_per_s:.0f} texts/s" for each in candidates)
        self._say(f"kept {best.name}: {shown}")
        return best

    def _new(self, name: str) -> Path:
        folder = self._scratch / name
        folder.mkdir()
        return folder

    def _copy_facts(self, source: Path, target: Path) -> None:
        for name in (MODEL, TOKENIZER):
            shutil.copy(source / name, target)


if __name__ == "__main__":
    main()
