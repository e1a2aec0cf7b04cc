"""Traces a model for Neuron cores, from token ids to vectors, once for each length. Needs sentence-transformers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from embedctl_config.errors import WorkerError
from embedctl_workers.backends.neuron.options import TraceOptions
from embedctl_workers.backends.neuron.runtime import RUNTIME, version_of
from embedctl_workers.backends.neuron.traces import Traces, trace_file
from embedctl_workers.backends.onnx.export import WholeModel, pooling_excludes_prompt, write_facts
from embedctl_workers.backends.onnx.inputs import POOLING_MASK, ModelFacts
from embedctl_workers.backends.torch.loading import fast_tokenizer, load_sentence_transformer
from embedctl_workers.models.files import ModelFiles


def write_traces(
    files: ModelFiles,
    folder: Path,
    runtime: Any,
    options: TraceOptions,
    flags: Sequence[str],
    target: str,
    say: Callable[[str], None],
) -> Traces:
    """Write a model's traces, its tokenizer, and the facts about both that a worker needs.

    Args:
        runtime: `torch_neuronx`.
        flags: the compiler's, without the target.
        target: the instance family to compile for without a device; empty for the device at hand.
        say: called with lines about the progress.

    Raises:
        ModelError: the model can't be loaded, or is of a kind that can't be traced.
        SettingsError: the buckets are too short for the model.
        WorkerError: this runtime can't trace without a device.
    """
    model = load_sentence_transformer(files)
    tokenizer = fast_tokenizer(model, files)
    _prepare(model)
    excludes_prompt = pooling_excludes_prompt(model, files)
    write_facts(folder, model, tokenizer, excludes_prompt=excludes_prompt)
    names = [name for name in tokenizer.model_input_names if name != "attention_mask"] + ["attention_mask"]
    if excludes_prompt:
        names.append(POOLING_MASK)
    traces = Traces(names, options.buckets_for(ModelFacts.read(folder).max_tokens), options.batch)
    for bucket in traces.buckets:
        say(f"tracing {traces.batch} rows of {bucket} tokens")
        example = tuple(example_of(name, tokenizer, traces.batch, bucket) for name in names)
        traced = _trace(runtime, WholeModel(model, names), example, flags, target)
        torch.jit.save(traced, str(trace_file(folder, bucket)))
    traces.write(folder)
    return traces


def example_of(name: str, tokenizer: PreTrainedTokenizerFast, rows: int, width: int) -> torch.Tensor:
    """An input to trace a model with, int64, rows × width: rows of falling lengths.

    Each row ends in padding. Models skip the mask of a batch without padding, and a trace repeats what the model did
    with its example.
    """
    if name == "token_type_ids":
        return torch.zeros(rows, width, dtype=torch.int64)
    lengths = torch.arange(width - 1, width - 1 - rows, -1).clamp(min=1)
    mask = (torch.arange(width) < lengths[:, None]).to(torch.int64)
    if name != "input_ids":
        return mask
    # Any tokens will do; those in the middle of the vocabulary are not special tokens.
    ids = (torch.arange(rows * width).reshape(rows, width) + len(tokenizer) // 2) % len(tokenizer)
    return torch.where(mask == 1, ids, torch.full_like(ids, tokenizer.pad_token_id or 0))


def _prepare(model: torch.nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # Other implementations look at the mask's values to decide whether they use it at all.
            part.set_attn_implementation("eager")
            part.config.use_cache = False


def _trace(
    runtime: Any, model: torch.nn.Module, example: tuple[torch.Tensor, ...], flags: Sequence[str], target: str
) -> torch.jit.ScriptModule:
    arguments: dict[str, Any] = {"compiler_args": list(flags)}
    if target:
        if "cpu_backend" not in inspect.signature(runtime.trace).parameters:
            raise WorkerError(
                f"{RUNTIME} {version_of(RUNTIME)} can't trace without a device: use a newer one, or build on a "
                "machine with a device, without --target"
            )
        arguments = {"compiler_args": [*flags, "--target", target], "cpu_backend": True}
    with tempfile.TemporaryDirectory(prefix="embedctl-neuron-") as scratch, torch.no_grad():
        traced: torch.jit.ScriptModule = runtime.trace(model.eval(), example, compiler_workdir=scratch, **arguments)
    return traced
