"""Runs traces of torch_neuronx on one AWS Neuron core. The artefact suffices: sentence-transformers is not needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from embedctl_config.errors import ModelError, WorkerError
from embedctl_config.hardware import THRESHOLDS, ModelEntry
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.backends.neuron.recipe import TraceOptions, artifact_for
from embedctl_workers.backends.neuron.runtime import RUNTIME, Traces, device_lost, load_runtime, trace_file, version_of
from embedctl_workers.backends.onnx.inputs import GraphBackend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, resolve_model
from embedctl_workers.redaction import first_line

_SHORT, _WORD = "a", "word "
#: The number of tokens of a word is unknown: the number of words is halved this often, so that a text fits a row.
_HALVINGS = 6
#: Threads that feed the core: while one waits for the core, the other has queued the next run.
FEEDERS = 2
#: Most rows of the longest length in a batch. Batches are large, because only a batch's last run has dummy rows.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a trace, `bucket` tokens long, for the rows `at` (int64) of the batch, at most a trace's."""

    bucket: int
    at: Rows


def runs_of(lengths: Rows, buckets: Sequence[int], batch: int) -> list[Run]:
    """Cut rows into as few runs as possible, longest first, each as short as its longest row allows.

    A run of `batch` rows costs the same however many of them are used. So shorter rows fill up a run of longer rows
    before they get another run. No row is longer than the last bucket; `buckets` ascend.
    """
    order = np.argsort(-lengths, kind="stable")
    parts = [order[start : start + batch] for start in range(0, len(order), batch)]
    return [Run(buckets[bisect_left(buckets, int(lengths[part[0]]))], part) for part in parts]


def positions_of(lengths: Rows, buckets: Sequence[int], batch: int) -> int:
    """The number of tokens that the device computes for rows of these lengths, padding and dummy rows included."""
    return sum(run.bucket * batch for run in runs_of(lengths, buckets, batch))


def check_padding(
    model: str,
    buckets: Sequence[int],
    batch: int,
    tokenize: Callable[[Sequence[str], str | None], Tokens],
    run: Callable[[Tokens, Rows, int], Vectors],
) -> None:
    """Encode a short text in every bucket, alone and beside texts that fill their rows.

    `run` computes vectors of some of the texts, at most `batch`, in a bucket. If the short text's vector differs
    between runs by more than the bound of `fp16`, that is a ModelError.
    """
    bound = THRESHOLDS["fp16"].min_cosine
    expected: Vectors | None = None
    for bucket in buckets:
        tokens = tokenize([_SHORT, *(_WORD * (bucket >> halved) for halved in range(_HALVINGS))], "")
        fitting = np.flatnonzero(tokens.lengths <= bucket)
        if 0 not in fitting:
            continue
        crowded = np.full(batch, fitting[np.argmax(tokens.lengths[fitting])])
        crowded[0] = 0
        for rows in (np.zeros(1, np.int64), crowded):
            found = unit(run(tokens, rows, bucket)[:1])
            expected = found if expected is None else expected
            cosine = float((found * expected).sum())
            if not cosine >= bound:
                raise ModelError(
                    f"model {model!r}: padding shows in its vectors on Neuron (cosine {cosine:.4f} in a run of "
                    f"{batch} × {bucket} tokens): its trace does not mask it"
                )


@dataclass(frozen=True, slots=True)
class Pending:
    """Runs that were handed to the feeding threads, and their total number of rows."""

    rows: int
    runs: Sequence[Run]
    vectors: Sequence[Future[Vectors]]


class NeuronBackend(GraphBackend):
    """A sentence-transformers model as one trace for each length, pooling included.

    Texts are tokenised once, unpadded. A batch is cut into runs with as many rows as the traces. A run that lacks rows
    is filled up with copies of one of its rows.

    Options: those of :class:`~embedctl_workers.backends.neuron.recipe.TraceOptions`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("buckets", "batch", "auto_cast", "target")

    def __init__(self, files: ModelFiles, folder: Path, host: Host) -> None:
        load_runtime()
        self._name = files.name
        self._traces = Traces.read(folder)
        super().__init__(files, folder, self._traces.inputs, host)
        self._modules = {bucket: _load(trace_file(folder, bucket), files.name) for bucket in self._traces.buckets}
        self._feeders = ThreadPoolExecutor(FEEDERS, thread_name_prefix="neuron")
        self.engine = engine_of(self._traces)
        self.ahead = 1
        self.token_budget = _ROWS * self.max_tokens

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        chosen = TraceOptions.parse(options)
        files = resolve_model(model, entry)
        return cls(files, artifact_for(files, host, chosen).folder, host)

    def forward(self, tokens: Tokens, rows: Rows) -> Pending:
        runs = runs_of(tokens.lengths[rows], self._traces.buckets, self._traces.batch)
        vectors = [self._feeders.submit(self._run, tokens, rows[run.at], run.bucket) for run in runs]
        return Pending(len(rows), runs, vectors)

    def finish(self, output: Pending, *, normalize: bool) -> Vectors:
        wait(output.vectors)  # even if one fails: no run of a failed batch may overlap with later work
        vectors = np.empty((output.rows, self.dim), np.float32)
        for run, part in zip(output.runs, output.vectors, strict=True):
            vectors[run.at] = part.result()
        return unit(vectors) if normalize else vectors

    def positions(self, lengths: Rows) -> int:
        return positions_of(lengths, self._traces.buckets, self._traces.batch)

    def warm_up(self) -> None:
        """Run every trace; a ModelError if padding or neighbouring rows change a vector."""
        check_padding(self._name, self._traces.buckets, self._traces.batch, self.tokenize, self._run)

    def close(self) -> None:
        self._feeders.shutdown()
        self._modules = {}

    def _run(self, tokens: Tokens, rows: Rows, bucket: int) -> Vectors:
        """Vectors of some texts, rows × dim, at most as many as a run has rows; DeviceLost if the core is lost."""
        # Rows without any token would not do: their softmax is NaN, and Neuron fails a whole run for one NaN.
        filled = np.concatenate([rows, np.repeat(rows[:1], self._traces.batch - len(rows))])
        batch = self._inputs.batch(tokens, filled, bucket)
        inputs = [torch.from_numpy(batch[name]) for name in self._traces.inputs]
        try:
            with torch.inference_mode():
                output = self._modules[bucket](*inputs)
        except Exception as error:  # torch.jit's own errors are not RuntimeErrors
            if (lost := device_lost(error)) is not None:
                raise lost from error
            raise
        vectors: Vectors = output[: len(rows)].float().numpy()
        return vectors


def engine_of(traces: Traces) -> str:
    shortest, longest = traces.buckets[0], traces.buckets[-1]
    return (
        f"{RUNTIME} {version_of(RUNTIME)}, {len(traces.buckets)} traces of {traces.batch} × {shortest}–{longest} tokens"
    )


def _load(path: Path, model: str) -> Callable[..., torch.Tensor]:
    """Put a trace on the core; a WorkerError if the core does not take it."""
    try:
        trace: Callable[..., torch.Tensor] = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # it has no types
    except Exception as error:  # torch.jit's own errors are not RuntimeErrors
        raise WorkerError(
            f"{path.name} of model {model!r} can't be put on the Neuron core ({first_line(error)}): does another "
            "process use the core, or has the core too little memory for this number of buckets?"
        ) from error
    return trace
