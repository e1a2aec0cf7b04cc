"""`python -m embedctl_workers.building.neuron REQUEST`: fill an artefact's folder. The backend's `recipe` runs this.

This is a separate process, so that a worker never holds both the model and its traces, nor the core during compilation.
Progress goes to standard output. The last line there is a JSON object: the contents of the manifest, or `error`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.backends.neuron.backend import NeuronBackend, engine_of
from embedctl_workers.backends.neuron.options import TraceOptions
from embedctl_workers.backends.neuron.recipe import NEURON
from embedctl_workers.backends.neuron.runtime import COMPILER, RUNTIME, load_runtime
from embedctl_workers.backends.neuron.tracing import write_traces
from embedctl_workers.backends.onnx.export import versions
from embedctl_workers.building.manifests import accuracy_of, model_of
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.build_process import answer_request
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import gate_texts

_PACKAGES = ("embedctl", "torch", "transformers", "sentence-transformers", "tokenizers", RUNTIME, COMPILER)
_ROUNDS = 5
#: Copies of each text in the timed batch, so that few rows of a run are dummies.
_REPEATED = 16


def main() -> None:
    """Run the command line."""
    answer_request(build, 'use a class with backend = "torch"')


def build(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Fill `request["folder"]`, and return the contents of the manifest, with measurements if a device is at hand.

    Raises:
        EmbedctlError: the model can't be traced here.
    """
    files = ModelFiles(request["name"], Path(request["source"]), request["fingerprint"])
    folder, options = Path(request["folder"]), TraceOptions.parse(request["options"])
    flags, elsewhere = request["flags"], request["elsewhere"]
    traces = write_traces(files, folder, load_runtime(), options, flags, request["target"] if elsewhere else "", say)
    return {
        "model": model_of(files),
        "engine": engine_of(traces),
        "built": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions(*_PACKAGES)},
        "graph": {"name": "traces", "buckets": traces.buckets, "batch": traces.batch, "target": request["target"]},
        **({"accuracy": None, "rate": None} if elsewhere else _measured(files, folder, request, say)),
    }


def _measured(
    files: ModelFiles, folder: Path, request: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """The manifest's entries about accuracy and rate, measured on the device at hand."""
    say("comparing with torch")
    host = Host(request["threads"], Path(request["cache"]))
    backend = NeuronBackend(files, folder, host)
    try:
        backend.warm_up()
        encoder = ChunkEncoder(backend, backend.token_budget)
        report = measure_backend(encoder, SHIPPED_CLASSES[NEURON], host)
        assert report is not None
        say(report.figures)
        if not report.passed:
            say('warning: not accurate enough, and a worker\'s gate will refuse it; try auto_cast = "none"')
        say("measuring")
        rate, lengths = _rate(backend)
    finally:
        backend.close()
    return {
        "accuracy": accuracy_of(report),
        "rate": {
            "sentences_per_s": round(rate, 1),
            "tokens_per_s": round(rate * lengths, 1),
            "device": f"a Neuron core of {request['target']}",
            "texts": f"the same, {_REPEATED} times",
        },
    }


def _rate(backend: NeuronBackend) -> tuple[float, float]:
    """Texts per second, and tokens per text."""
    tokens = backend.tokenize(gate_texts(), None)
    rows = np.tile(np.arange(len(tokens.lengths)), _REPEATED)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        backend.finish(backend.forward(tokens, rows), normalize=True)
        seconds.append(time.perf_counter() - started)
    return len(rows) / min(seconds), float(tokens.lengths.mean())


if __name__ == "__main__":
    main()
