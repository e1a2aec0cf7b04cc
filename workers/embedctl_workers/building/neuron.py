"""`python -m embedctl_workers.building.neuron REQUEST`: fill an artefact's folder. The backend's `recipe` runs this.

This is a separate process, so that a worker never holds both the model and its traces, nor the core during compilation.
Progress goes to standard output. The last line there is a JSON object: the contents of the manifest, or `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from embedctl_workers.backends.neuron.backend import engine_of
from embedctl_workers.backends.neuron.recipe import TraceOptions
from embedctl_workers.backends.neuron.runtime import COMPILER, RUNTIME, load_runtime
from embedctl_workers.backends.neuron.tracing import tracer, write_traces
from embedctl_workers.building.manifests import origin_of
from embedctl_workers.models.build_process import answer_request, read_request


def main() -> None:
    answer_request(build, 'use a class with backend = "torch"')


def build(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Fill `request["folder"]`, and return the contents of the manifest; the gate of a worker measures the vectors."""
    files, _, folder = read_request(request)
    options = TraceOptions.parse(request["options"])
    trace = tracer(load_runtime(), request["flags"], request["target"] if request["elsewhere"] else "")
    traces = write_traces(files, folder, options, trace, say)
    return {
        **origin_of(request, files, engine_of(traces), RUNTIME, COMPILER),
        "graph": {"name": "traces", "buckets": traces.buckets, "batch": traces.batch, "target": request["target"]},
    }


if __name__ == "__main__":
    main()
