"""`python -m embedctl_workers.building.neuron REQUEST`: fill an artefact's folder. The backend's `recipe` runs this.

This is a separate process, so that a worker never holds both the model and its traces, nor the core during compilation.
Progress goes to standard output. The last line there is a JSON object: the contents of the manifest, or `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_workers.backends.neuron.backend import NeuronBackend, engine_of
from embedctl_workers.backends.neuron.options import TraceOptions
from embedctl_workers.backends.neuron.recipe import NEURON
from embedctl_workers.backends.neuron.runtime import COMPILER, RUNTIME, load_runtime
from embedctl_workers.backends.neuron.tracing import tracer, write_traces
from embedctl_workers.building.manifests import accuracy_of, origin_of, rate_of, report_of, texts_per_s
from embedctl_workers.machine.host import Host
from embedctl_workers.models.build_process import answer_request, read_request
from embedctl_workers.models.files import ModelFiles

#: Copies of each text in the timed batch, so that few rows of a run are dummies.
_REPEATED = 16


def main() -> None:
    answer_request(build, 'use a class with backend = "torch"')


def build(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Fill `request["folder"]`, and return the contents of the manifest, with measurements if a device is at hand."""
    files, host, folder = read_request(request)
    options = TraceOptions.parse(request["options"])
    elsewhere = request["elsewhere"]
    trace = tracer(load_runtime(), request["flags"], request["target"] if elsewhere else "")
    traces = write_traces(files, folder, options, trace, say)
    return {
        **origin_of(request, files, engine_of(traces), RUNTIME, COMPILER),
        "graph": {"name": "traces", "buckets": traces.buckets, "batch": traces.batch, "target": request["target"]},
        **({"accuracy": None, "rate": None} if elsewhere else _measured(files, folder, host, request["target"], say)),
    }


def _measured(files: ModelFiles, folder: Path, host: Host, target: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The manifest's entries about accuracy and rate, measured on the device at hand."""
    say("comparing with torch")
    backend = NeuronBackend(files, folder, host)
    try:
        backend.warm_up()
        report = report_of(backend, SHIPPED_CLASSES[NEURON], host)
        say(report.figures)
        if not report.passed:
            say('warning: not accurate enough, and a worker\'s gate will refuse it; try auto_cast = "none"')
        say("measuring")
        rate = texts_per_s(backend, _REPEATED)
        how = {"texts": f"the same, {_REPEATED} times", "device": f"a Neuron core of {target}"}
        return {"accuracy": accuracy_of(report), "rate": rate_of(backend, rate, **how)}
    finally:
        backend.close()


if __name__ == "__main__":
    main()
