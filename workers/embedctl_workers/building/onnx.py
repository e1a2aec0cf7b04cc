"""`python -m embedctl_workers.building.onnx REQUEST`: fill an artefact's folder. The backend's `recipe` runs this.

This is a separate process, so that a worker never holds torch. The graph goes through the accuracy gate. Progress goes
to standard output. The last line there is a JSON object: the contents of the manifest, or `error`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.accuracy.report import Report
from embedctl_workers.backends.onnx import graphs
from embedctl_workers.backends.onnx.backend import OnnxBackend, OnnxInt8Backend
from embedctl_workers.backends.onnx.export import EXPORTERS
from embedctl_workers.backends.onnx.inputs import GRAPH, MODEL, TOKENIZER
from embedctl_workers.backends.onnx.recipe import ONNX_INT8, reduced_range
from embedctl_workers.building.manifests import accuracy_of, origin_of, report_of
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.build_process import answer_request, read_request
from embedctl_workers.models.files import ModelFiles

_FP32 = HardwareClass(backend="onnx")
_INT8 = HardwareClass(backend=ONNX_INT8, precision="int8")
#: The packages that affect a graph.
PACKAGES = ("onnx", "onnxruntime", "optimum", "optimum-onnx")


@dataclass(slots=True)
class Candidate:
    """A graph that was loaded, and compared with torch."""

    name: str
    folder: Path
    backend: OnnxBackend
    report: Report


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
        """The graph of a kind; a ModelError if in fp32 it does not give the model's vectors."""
        plain = self._new("plain")
        self._say(f"exporting with {exporter} exporter")
        EXPORTERS[exporter](self._files, plain)
        self._say("comparing with torch")
        exact = self._candidate(plain, OnnxBackend, _FP32)
        if not exact.report.passed:
            raise ModelError(
                f"its ONNX graph does not reproduce its vectors ({exact.report.figures}): "
                'use a class with backend = "torch"'
            )
        if kind != ONNX_INT8:
            return exact
        self._say("quantising")
        exact.backend.close()  # quantising alone takes several times the model's size
        folder = self._new("plain int8")
        graphs.quantize(plain / GRAPH, folder / GRAPH, reduce_range=reduced_range())
        for name in (MODEL, TOKENIZER):
            shutil.copy(plain / name, folder / name)
        small = self._candidate(folder, OnnxInt8Backend, _INT8)
        if not small.report.passed:
            self._say("warning: int8 is not accurate enough for this model, and a worker's gate will refuse it")
        return small

    def facts(self, best: Candidate, folder: Path) -> dict[str, Any]:
        """The manifest's entries about the graph, and what was measured of it."""
        return {
            "graph": {"name": best.name.partition(" ")[0], "operators": graphs.operators_of(folder / GRAPH)},
            "accuracy": accuracy_of(best.report),
        }

    def _candidate(self, folder: Path, kind: type[OnnxBackend], hardware: HardwareClass) -> Candidate:
        name = folder.name
        artifact = Artifact(folder, {"graph": {"name": name.partition(" ")[0]}})
        backend = kind(self._files, artifact, self._host)
        report = report_of(backend, hardware, self._host)
        self._say(f"{name}: {report.figures}")
        return Candidate(name, folder, backend, report)

    def _new(self, name: str) -> Path:
        folder = self._scratch / name
        folder.mkdir()
        return folder


if __name__ == "__main__":
    main()
