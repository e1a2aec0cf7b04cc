"""`python -m embedctl_workers.neuron.build REQUEST`: fill the folder of an artefact; what `recipe` runs.

A process of its own, so that a worker never holds the model beside its traces, nor the core while it is compiled for.
Progress goes to standard output; the last line there is a JSON object: what the manifest is to say, or `error`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_config.errors import EmbedctlError
from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_workers.backends.base import Host
from embedctl_workers.backends.neuron import NeuronBackend, engine_of
from embedctl_workers.encoder import ChunkEncoder
from embedctl_workers.gate import gate_texts, measure_backend
from embedctl_workers.models import ModelFiles
from embedctl_workers.neuron.options import TraceOptions
from embedctl_workers.neuron.recipe import NEURON
from embedctl_workers.neuron.runtime import COMPILER, RUNTIME, load_runtime
from embedctl_workers.neuron.tracing import write_traces
from embedctl_workers.onnx.export import versions

_PACKAGES = ("embedctl", "torch", "transformers", "sentence-transformers", "tokenizers", RUNTIME, COMPILER)
_ROUNDS = 5
#: How often each text stands in what is timed, so that few rows of a run are dummies.
_REPEATED = 16


def main() -> None:
    """Run the command line."""
    request = json.loads(sys.argv[1])
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries and their compiler print is no progress of ours
    say = partial(print, file=progress, flush=True)
    try:
        facts = build(request, say)
    except EmbedctlError as error:
        facts = {"error": str(error)}
    except Exception as error:  # noqa: BLE001  (tracing fails in as many ways as there are models)
        line = str(error).partition("\n")[0][:300]
        facts = {"error": f'{type(error).__name__}: {line}; use a class with backend = "torch"'}
    say(json.dumps(facts))


def build(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Fill `request["folder"]`; measured where a device is at hand.

    Raises:
        EmbedctlError: it can't be traced here.
    """
    files = ModelFiles(request["name"], Path(request["source"]), request["fingerprint"])
    folder, options = Path(request["folder"]), TraceOptions.parse(request["options"])
    elsewhere = request["elsewhere"]
    traces = write_traces(files, folder, load_runtime(), options, request["target"] if elsewhere else "", say)
    weights = sum(path.stat().st_size for path in files.folder.glob("*.safetensors"))
    return {
        "model": {"name": files.name, "source": str(files.folder), "weights_bytes": weights},
        "engine": engine_of(traces),
        "built": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions(*_PACKAGES)},
        "graph": {"name": "traces", "buckets": traces.buckets, "batch": traces.batch, "target": request["target"]},
        **({"accuracy": None, "rate": None} if elsewhere else _measured(files, folder, request, say)),
    }


def _measured(
    files: ModelFiles, folder: Path, request: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Accuracy and rate on the device at hand."""
    say("comparing with torch")
    backend = NeuronBackend(files, folder)
    try:
        backend.warm_up()
        encoder = ChunkEncoder(backend, backend.token_budget)
        report = measure_backend(encoder, SHIPPED_CLASSES[NEURON], Host(request["threads"], Path(request["cache"])))
        assert report is not None
        say(report.figures)
        if not report.passed:
            say('warning: not accurate enough, a worker\'s gate will refuse it; try auto_cast = "none"')
        say("measuring")
        rate, lengths = _rate(backend)
    finally:
        backend.close()
    measured = report.checks[0].measured
    return {
        "accuracy": {
            "against": "sentence-transformers on torch in fp32, text by text, normalised",
            "texts": f"the {len(gate_texts())} of the accuracy gate",
            "max_abs_error": measured.max_abs_error,
            "mean_cosine": measured.mean_cosine,
            "min_cosine": measured.min_cosine,
            "passed": report.passed,
            "bounds": report.bounds.stated(),
        },
        "rate": {
            "sentences_per_s": round(rate, 1),
            "tokens_per_s": round(rate * lengths, 1),
            "device": f"a Neuron core of {request['target']}",
            "texts": f"the same, {_REPEATED} times",
        },
    }


def _rate(backend: NeuronBackend) -> tuple[float, float]:
    """Texts a second, and tokens a text."""
    tokens = backend.tokenize(gate_texts(), None)
    rows = np.tile(np.arange(len(tokens.lengths)), _REPEATED)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        backend.finish(backend.forward(tokens, rows), normalize=True)
        seconds.append(time.perf_counter() - started)
    return len(rows) / min(seconds), float(tokens.lengths.mean())


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
