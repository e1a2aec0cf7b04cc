"""TensorRT plans on an NVIDIA GPU, in 16 bits. Not verified on hardware."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.backends.gpu.device import Event
from embedctl_workers.backends.onnx.inputs import GraphBackend
from embedctl_workers.backends.tensorrt import runtime as runtimes
from embedctl_workers.backends.tensorrt.engine import Begun, LoadedPlan, PlanRefused
from embedctl_workers.backends.tensorrt.profiles import Piece, pieces_of
from embedctl_workers.backends.tensorrt.recipe import PLAN, PlanOptions, artifact_for, profiles_of
from embedctl_workers.backends.tensorrt.runtime import Runtime
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.builders import BuildOptions
from embedctl_workers.models.files import ModelFiles, resolve_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Output:
    """A batch that was handed to the device; see :class:`Begun`."""

    pieces: Sequence[tuple[Piece, Begun]]
    done: Event


class TensorRTBackend(GraphBackend):
    """A sentence-transformers model as one plan, pooling included, built for the GPU at hand.

    Texts are tokenised once, unpadded. A batch is cut into pieces by the plan's profiles, one per bucket of lengths.
    Each piece is padded to little more than its own longest row.

    Options: `dtype`, the type to compute in: `auto`, `fp16`, `bf16` or `fp32`; `batch_tokens`, tokens of a usual batch.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("dtype", "batch_tokens")

    def __init__(
        self, files: ModelFiles, artifact: Artifact, runtime: Runtime, host: Host, options: PlanOptions
    ) -> None:
        self._runtime = runtime
        self._profiles = profiles_of(artifact.folder, options)
        plan = (artifact.folder / PLAN).read_bytes()
        engine = LoadedPlan(runtime, plan, self._profiles)
        self._engine: LoadedPlan | None = engine
        super().__init__(files, artifact.folder, engine.inputs, host)
        # One batch is on the device, and one is queued behind it.
        self.ahead, self.token_budget = 1, options.batch_tokens
        self.engine = f"TensorRT {runtime.version}, {artifact.manifest['graph']['name']}, {runtime.device.name}"

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        chosen = PlanOptions(**options)
        files = resolve_model(model, entry)
        runtime = runtimes.open_runtime()
        artifact = artifact_for(files, runtime, host, chosen)
        try:
            return cls(files, artifact, runtime, host, chosen)
        except PlanRefused as error:
            if not host.build:
                raise ModelError(
                    f"{artifact.folder}: {error}, and --no-build forbids building it: run "
                    f"`embedctl model build {files.name} --class gpu-tensorrt --force`"
                ) from error
            log.warning("%s: %s: it is built again", artifact.folder, error)
        return cls(files, artifact_for(files, runtime, host, chosen, BuildOptions(force=True)), runtime, host, chosen)

    def forward(self, tokens: Tokens, rows: Rows) -> Output:
        engine = self._engine
        if engine is None:
            raise ModelError("this model was closed")
        device = self._runtime.device
        begun: list[tuple[Piece, Begun]] = []
        with device.watched(), device.current():
            try:
                for piece in pieces_of(self._profiles, tokens.lengths[rows]):
                    batch = self._inputs.batch(tokens, rows[piece.places], piece.width)
                    begun.append((piece, engine.begin(piece.profile, batch)))
            except Exception:
                device.wait()  # the earlier pieces are dropped, so the device must be done with them
                raise
            return Output(begun, device.mark())

    def finish(self, output: Output, *, normalize: bool) -> Vectors:
        with self._runtime.device.watched():
            output.done.synchronize()
        vectors = np.empty((sum(len(piece.places) for piece, _ in output.pieces), self.dim), np.float32)
        for piece, begun in output.pieces:
            vectors[piece.places] = begun.vectors.numpy()
        return unit(vectors) if normalize else vectors

    def positions(self, lengths: Rows) -> int:
        return sum(len(piece.places) * piece.width for piece in pieces_of(self._profiles, lengths))

    def warm_up(self) -> None:
        for number, profile in enumerate(self._profiles):
            self._run_once(number, profile.usual, profile.longest)

    def close(self) -> None:
        self._engine = None

    def _run_once(self, profile: int, rows: int, width: int) -> Begun:
        """Run a piece whose rows hold only the first token of the vocabulary, and return it."""
        assert self._engine is not None
        device = self._runtime.device
        ones, zeros = np.ones((rows, width), np.int64), np.zeros((rows, width), np.int64)
        batch = {name: ones if name.endswith("mask") else zeros for name in self._engine.inputs}
        with device.watched(), device.current():
            begun = self._engine.begin(profile, batch)
            device.mark().synchronize()
            return begun
