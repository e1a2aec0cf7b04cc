"""Traces a model for Neuron cores, from token ids to vectors, once for each length. Needs sentence-transformers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from embedctl_config.errors import WorkerError
from embedctl_workers.backends.neuron.recipe import TraceOptions
from embedctl_workers.backends.neuron.runtime import RUNTIME, Traces, trace_file, version_of
from embedctl_workers.backends.onnx.export import WholeModel, example_of, write_facts
from embedctl_workers.backends.onnx.inputs import ModelFacts
from embedctl_workers.backends.torch.loading import fast_tokenizer, load_sentence_transformer
from embedctl_workers.models.files import ModelFiles

Trace = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], torch.jit.ScriptModule]


def write_traces(
    files: ModelFiles, folder: Path, options: TraceOptions, trace: Trace, say: Callable[[str], None]
) -> Traces:
    """Write a model's traces, its tokenizer, and the facts about both that a worker needs.

    Args:
        trace: traces a model with an example of its arguments; see :func:`tracer`.
        say: called with lines about the progress.

    Raises:
        ModelError: the model can't be loaded, or is of a kind that can't be traced.
        SettingsError: the buckets are too short for the model.
        WorkerError: this runtime can't trace without a device.
    """
    model = load_sentence_transformer(files)
    tokenizer = fast_tokenizer(model, files)
    _prepare(model)
    names = write_facts(folder, files, model, tokenizer)
    traces = Traces(names, options.buckets_for(ModelFacts.read(folder).max_tokens), options.batch)
    for bucket in traces.buckets:
        say(f"tracing {traces.batch} rows of {bucket} tokens")
        # Rows of falling lengths, each of which ends in padding: models skip the mask of a batch without padding, and a
        # trace repeats what the model did with its example.
        lengths = [max(1, bucket - 1 - row) for row in range(traces.batch)]
        example = tuple(example_of(name, tokenizer, lengths, bucket) for name in names)
        traced = trace(WholeModel(model, names), example)
        torch.jit.save(traced, str(trace_file(folder, bucket)))
    traces.write(folder)
    return traces


def _prepare(model: torch.nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # Other implementations look at the mask's values to decide whether they use it at all.
            part.set_attn_implementation("eager")
            part.config.use_cache = False


def tracer(runtime: Any, flags: Sequence[str], target: str) -> Trace:
    """Traces with the runtime, which is `torch_neuronx`.

    Args:
        flags: the compiler's, without the target.
        target: the instance family to compile for, without a device; an empty one stands for this machine's device.
    """
    arguments: dict[str, Any] = {"compiler_args": list(flags)}
    if target:
        if "cpu_backend" not in inspect.signature(runtime.trace).parameters:
            raise WorkerError(
                f"{RUNTIME} {version_of(RUNTIME)} can't trace without a device: use a newer one, or build on a "
                "machine with a device, without --target"
            )
        arguments = {"compiler_args": [*flags, "--target", target], "cpu_backend": True}

    def trace(model: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> torch.jit.ScriptModule:
        with tempfile.TemporaryDirectory(prefix="embedctl-neuron-") as scratch, torch.no_grad():
            traced: torch.jit.ScriptModule = runtime.trace(model.eval(), example, compiler_workdir=scratch, **arguments)
        return traced

    return trace
