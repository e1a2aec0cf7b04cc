"""`python -m embedctl_workers.building.tensorrt REQUEST`: fill a plan's folder. The backend's `recipe` runs this.

This is a separate process, so that a worker does not keep what the builder loads, and a crash of the builder becomes an
error. A plan is kept if its vectors pass the accuracy gate for 16 bits. Progress and result are printed as by
`embedctl_workers.building.onnx`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.accuracy.report import Report
from embedctl_workers.backends.onnx.graphs import operators_of
from embedctl_workers.backends.onnx.inputs import GRAPH, MODEL, TOKENIZER
from embedctl_workers.backends.tensorrt import graphs
from embedctl_workers.backends.tensorrt import runtime as runtimes
from embedctl_workers.backends.tensorrt.backend import TensorRTBackend
from embedctl_workers.backends.tensorrt.recipe import PLAN, SIXTEEN_BITS, PlanOptions, build_plan, profiles_of
from embedctl_workers.building.manifests import accuracy_of, origin_of, report_of
from embedctl_workers.building.onnx import PACKAGES
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.build_process import answer_request, read_request

_CLASS = HardwareClass(device="gpu", backend="tensorrt", precision="fp16")


def main() -> None:
    answer_request(build, 'use a class with backend = "torch-gpu"')


def build(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Fill `request["folder"]`, and return the manifest's contents; a ModelError if no plan gives its vectors."""
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
            if not report.passed:
                failed.append(f"{dtype}: {report.figures}")
                continue
            for name in (PLAN, MODEL, TOKENIZER):
                shutil.move(made / name, folder / name)
            return facts
    raise ModelError(f'no plan reproduces its vectors ({"; ".join(failed)}): use a class with backend = "torch-gpu"')


class _Builder:
    def __init__(self, request: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.options = PlanOptions(**request["options"])
        self._request = request
        self._files, self._host, _ = read_request(request)
        self._graph = Path(request["graph"])
        self._say = say
        self._runtime = runtimes.open_runtime()

    def build(self, dtype: str, folder: Path) -> tuple[Report, dict[str, Any]]:
        """Fill a folder with a plan in a type; its accuracy report, and the contents of its manifest."""
        self._say(f"converting the graph to {dtype}")
        graphs.convert(self._graph / GRAPH, folder / GRAPH, dtype)
        self._say(f"building a plan in {dtype}, which takes minutes")
        plan = build_plan(self._runtime, folder / GRAPH, profiles_of(self._graph, self.options))
        (folder / PLAN).write_bytes(plan)
        for name in (MODEL, TOKENIZER):
            shutil.copy(self._graph / name, folder / name)
        artifact = Artifact(folder, {"graph": {"name": dtype}})
        backend = TensorRTBackend(self._files, artifact, self._runtime, self._host, self.options)
        backend.warm_up()
        report = report_of(backend, _CLASS, self._host)
        backend.close()
        facts = origin_of(self._request, self._files, backend.engine, *PACKAGES)
        facts["versions"]["tensorrt"] = self._runtime.version
        return report, {
            **facts,
            "graph": {"name": dtype, "operators": operators_of(folder / GRAPH)},
            "accuracy": accuracy_of(report),
        }


if __name__ == "__main__":
    main()
