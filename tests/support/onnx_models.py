"""ONNX artefacts made in a second, in this process, that are not measured or checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from embedctl_workers.backends.onnx.inputs import GRAPH
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.files import ModelFiles


def quick_artifact(files: ModelFiles, kind: str, host: Host, **_: Any) -> Artifact:
    """Stands in for `embedctl_workers.backends.onnx.recipe.artifact_for`."""
    from embedctl_workers.backends.onnx import graphs
    from embedctl_workers.backends.onnx.export import export_own

    folder = host.cache / "quick" / f"{files.fingerprint}-{kind}"
    if not folder.exists():
        plain = folder / "plain"
        plain.mkdir(parents=True)
        export_own(files, plain)
        if kind == "onnx-int8":
            graphs.quantize(plain / GRAPH, folder / GRAPH, reduce_range=False)
        for path in plain.iterdir():
            if not (folder / path.name).exists():
                shutil.copy(path, folder / path.name)
    return Artifact(folder, {"graph": {"name": "plain"}})


def spoil(graph: Path) -> None:
    """Make the first bias of a graph another one."""
    import onnx

    model = onnx.load(graph)
    bias = next(each for each in model.graph.initializer if "bias" in each.name)
    bias.CopyFrom(onnx.numpy_helper.from_array(1 - onnx.numpy_helper.to_array(bias), bias.name))
    onnx.save(model, graph)
