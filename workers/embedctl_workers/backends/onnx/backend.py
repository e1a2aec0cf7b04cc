"""ONNX graphs on onnxruntime, in fp32 or int8, without torch and transformers: the artefact holds all they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import onnxruntime

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry, Thresholds
from embedctl_config.outputs import Output
from embedctl_workers.arrays.outputs import Computed, computed_of, finished
from embedctl_workers.arrays.padding import used_places
from embedctl_workers.arrays.tokens import Found, Rows, Tokens
from embedctl_workers.backends.base import Reference
from embedctl_workers.backends.onnx.inputs import GRAPH, OUTPUT, GraphBackend, name_of
from embedctl_workers.backends.onnx.providers import CPU, check_provider, open_session, raise_if_lost
from embedctl_workers.backends.onnx.recipe import ONNX, ONNX_INT8, artifact_for
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.files import ModelFiles, resolve_model
from embedctl_workers.models.tuning import PADDED_BATCH_COST

#: The token budget for a GPU, which needs larger batches than a CPU.
_GPU_TOKEN_BUDGET = 8192


class OnnxBackend(GraphBackend):
    """A sentence-transformers model as one fp32 graph, pooling included.

    Texts are tokenised once, unpadded; each batch is padded to its own longest row.

    Options: `provider`: onnxruntime's execution provider, `cpu` or `cuda`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("provider",)
    #: The kind of artefact that this backend runs on the CPU.
    KIND: ClassVar[str] = ONNX

    def __init__(self, files: ModelFiles, artifact: Artifact, host: Host, provider: str = CPU) -> None:
        session = open_session(artifact.folder / GRAPH, host.threads, provider=provider)
        super().__init__(files, artifact.folder, [each.name for each in session.get_inputs()], host)
        self._provider = provider
        if provider == CPU:
            self.batch_cost = PADDED_BATCH_COST
        elif self.outputs != (Output.SPARSE,):  # the logits of all words are in memory, 122 kB for a token of BERT's
            self.token_budget = _GPU_TOKEN_BUDGET
        if stated := artifact.manifest.get("accuracy", {}).get("bounds"):
            self.reference = Reference(files, Thresholds(**stated))
        self._session: onnxruntime.InferenceSession | None = session
        precision = "int8" if self.KIND == ONNX_INT8 else "fp32"
        self.engine = (
            f"onnxruntime {onnxruntime.__version__}, {precision}, {artifact.manifest['graph']['name']}"
            f"{'' if provider == CPU else f', {provider}'}"
        )

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        provider = check_provider(options.get("provider", CPU))
        files = resolve_model(model, entry, plain=False)
        return cls(files, artifact_for(files, cls.KIND, host), host, provider)

    def forward(self, tokens: Tokens, rows: Rows) -> Computed:
        if self._session is None:
            raise ModelError("this model was closed")
        names = [name_of(output, self.outputs) for output in tokens.outputs]
        try:
            found = self._session.run(names, self._inputs.batch(tokens, rows))
        except Exception as error:
            raise_if_lost(error, self._provider)
            raise
        numbers = {
            # Numbers of tokens come with those of padding.
            output: np.asarray(each if name == OUTPUT else each[used_places(tokens, rows, each.shape[1])], np.float32)
            for output, name, each in zip(tokens.outputs, names, found, strict=True)
        }
        return computed_of(numbers, tokens, rows, self._inputs.facts.unused)

    def finish(self, output: Computed, *, normalize: bool) -> Found:
        return finished(output, normalize=normalize)

    def close(self) -> None:
        self._session = None


class OnnxInt8Backend(OnnxBackend):
    """The same in int8: weights are quantised per channel, activations dynamically.

    The activations of a batch share one range, so a vector depends on its neighbours, within int8's bounds.
    """

    #: It runs on CPUs only.
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    KIND: ClassVar[str] = ONNX_INT8
