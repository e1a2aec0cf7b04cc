"""ONNX graphs on onnxruntime, in fp32 or int8, without torch and transformers: the artefact holds all they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import onnxruntime

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry, Thresholds
from embedctl_workers.arrays.tokens import Rows, Side, Tokens, Vectors, padded
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.backends.base import Reference, run_warm_up_batches
from embedctl_workers.backends.onnx.inputs import GRAPH, OUTPUT, GraphInputs
from embedctl_workers.backends.onnx.providers import (
    CPU,
    MOST_ROWS,
    ON_CPU,
    TENSORRT,
    ProviderOptions,
    open_session,
    providers_for,
    raise_if_lost,
)
from embedctl_workers.backends.onnx.recipe import ONNX, ONNX_INT8, ONNX_PLAIN, artifact_for
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.files import ModelFiles, resolve_model
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET, PADDED_BATCH_COST

#: The token budget for a GPU, which needs larger batches than a CPU.
_GPU_TOKEN_BUDGET = 8192


class OnnxBackend:
    """A sentence-transformers model as one fp32 graph, pooling included.

    Texts are tokenised once, unpadded; each batch is padded to its own longest row.

    Options: `provider`: onnxruntime's execution provider, `cpu`, `cuda` or `tensorrt`; `fp16`: whether `tensorrt` may
    compute in 16 bits.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("provider", "fp16")
    #: The kind of artefact that this backend runs on the CPU.
    KIND: ClassVar[str] = ONNX

    def __init__(self, files: ModelFiles, artifact: Artifact, host: Host, options: ProviderOptions = ON_CPU) -> None:
        self.fingerprint = files.fingerprint
        self._provider = options.provider
        self.ahead = 0
        self.token_budget = DEFAULT_TOKEN_BUDGET if options.provider == CPU else _GPU_TOKEN_BUDGET
        self.batch_cost = PADDED_BATCH_COST if options.provider == CPU else None
        self.budget_by_sum = False
        self.joins = False
        stated = artifact.manifest.get("accuracy", {}).get("bounds")
        self.reference: Reference | None = Reference(files, Thresholds(**stated) if stated else None)
        graph = artifact.folder / GRAPH
        session = open_session(graph, host.threads)  # TensorRT needs the names of the inputs
        names = [each.name for each in session.get_inputs()]
        self._inputs = GraphInputs(artifact.folder, names, host)
        self.dim, self.max_tokens = self._inputs.facts.dim, self._inputs.facts.max_tokens
        if options.provider != CPU:
            providers = providers_for(
                options, inputs=names, max_tokens=self.max_tokens, cache=host.cache, prefix=artifact.folder.name
            )
            session = open_session(graph, host.threads, providers=providers)
        self._session: onnxruntime.InferenceSession | None = session
        precision = "int8" if self.KIND == ONNX_INT8 else "fp16" if options.fp16 else "fp32"
        self.engine = (
            f"onnxruntime {onnxruntime.__version__}, {precision}, {artifact.manifest['graph']['name']}"
            f"{'' if options.provider == CPU else f', {options.provider}'}"
        )

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        chosen = ProviderOptions(**options)
        files = resolve_model(model, entry)
        # The choice between a model's graphs was measured on a CPU, and TensorRT does not know the fused operators.
        kind = cls.KIND if chosen.provider == CPU else ONNX_PLAIN
        return cls(files, artifact_for(files, kind, host), host, chosen)

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        return self._inputs.tokenize(texts, prompt, truncation_side)

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        if self._session is None:
            raise ModelError("this model was closed")
        most = MOST_ROWS if self._provider == TENSORRT else len(rows)
        parts = [self._inputs.batch(tokens, rows[at : at + most]) for at in range(0, len(rows), most)]
        try:
            outputs = [self._session.run([OUTPUT], part)[0] for part in parts]
        except Exception as error:
            raise_if_lost(error, self._provider)
            raise
        return np.concatenate(outputs, dtype=np.float32)

    def finish(self, output: Vectors, *, normalize: bool) -> Vectors:
        return unit(output) if normalize else output

    def positions(self, lengths: Rows) -> int:
        return padded(lengths)

    def warm_up(self) -> None:
        run_warm_up_batches(self)

    def close(self) -> None:
        self._session = None


class OnnxInt8Backend(OnnxBackend):
    """The same in int8: weights are quantised per channel, activations dynamically.

    The activations of a batch share one range, so a vector depends on its neighbours, within int8's bounds.
    """

    #: It runs on CPUs only.
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    KIND: ClassVar[str] = ONNX_INT8
