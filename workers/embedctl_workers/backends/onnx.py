"""ONNX graphs on onnxruntime, in fp32 or int8, without torch and transformers: all they need is in the artefact."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry, Thresholds
from embedctl_workers.artifacts import Artifact
from embedctl_workers.backends.base import Host, Reference, Rows, Tokens, Vectors, padded
from embedctl_workers.models import ModelFiles, resolve_model
from embedctl_workers.onnx.recipe import ONNX, ONNX_INT8, artifact_for
from embedctl_workers.tokenizing import TextTokenizer
from embedctl_workers.tuning import DEFAULT_TOKEN_BUDGET
from embedctl_workers.vectors import unit

#: The files of an artefact.
GRAPH, MODEL, TOKENIZER = "model.onnx", "model.json", "tokenizer.json"
#: The graph's output, and the input of models that leave their prompt out of pooling.
OUTPUT, POOLING_MASK = "sentence_embedding", "pooling_mask"

_WARM_UP_LENGTHS = (8, 32, 128, 256)
_ERRORS_ONLY = 3


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the graph does not say of its model.

    Attributes:
        dim: length of a vector.
        max_tokens: most tokens of a text, special ones included.
        keep: which end of a text that is too long is kept.
        fillers: input → what it is padded with.
        prompt: put before each text where a job has no prompt of its own.
        excludes_prompt: whether pooling leaves out the prompt's tokens; the graph then takes a mask for it.
        special_ids: the tokenizer's, sorted.
    """

    dim: int
    max_tokens: int
    keep: Literal["left", "right"]
    fillers: Mapping[str, int]
    prompt: str
    excludes_prompt: bool
    special_ids: Sequence[int]

    def to_json(self) -> str:
        """For the artefact's folder."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


class OnnxBackend:
    """A sentence-transformers model as one fp32 graph, pooling included, on the CPU.

    Texts are tokenised once, unpadded; each batch is padded to its own longest row.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    #: The kind of artefact that it runs.
    KIND: ClassVar[str] = ONNX

    def __init__(self, files: ModelFiles, artifact: Artifact, host: Host) -> None:
        self.fingerprint = files.fingerprint
        self.ahead, self.token_budget = 0, DEFAULT_TOKEN_BUDGET
        stated = artifact.manifest.get("accuracy", {}).get("bounds")
        self.reference: Reference | None = Reference(files, Thresholds(**stated) if stated else None)
        facts = ModelFacts(**json.loads((artifact.folder / MODEL).read_text(encoding="utf-8")))
        self.dim, self.max_tokens = facts.dim, facts.max_tokens
        self._facts = facts
        self._session: onnxruntime.InferenceSession | None = open_session(artifact.folder / GRAPH, host.threads)
        self._inputs = [each.name for each in self._session.get_inputs()]
        self._tokenize = TextTokenizer(
            Tokenizer.from_file(str(artifact.folder / TOKENIZER)),
            max_tokens=facts.max_tokens,
            columns=[name for name in self._inputs if name in facts.fillers],
            keep=facts.keep,
        )
        precision = "int8" if self.KIND == ONNX_INT8 else "fp32"
        self.engine = f"onnxruntime {onnxruntime.__version__}, {precision}, {artifact.manifest['graph']['name']}"

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        files = resolve_model(model, entry)
        return cls(files, artifact_for(files, cls.KIND, host), host)

    def tokenize(self, texts: Sequence[str], prompt: str | None) -> Tokens:
        prompt = self._facts.prompt if prompt is None else prompt
        if not prompt:
            return self._tokenize(texts)
        tokens = self._tokenize([prompt + text for text in texts])
        return replace(tokens, prompt_tokens=self._count(prompt)) if self._facts.excludes_prompt else tokens

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        if self._session is None:
            raise ModelError("this model was closed")
        (output,) = self._session.run([OUTPUT], self._batch(tokens, rows))
        return np.asarray(output, np.float32)

    def finish(self, output: Vectors, *, normalize: bool) -> Vectors:
        return unit(output) if normalize else output

    def positions(self, lengths: Rows) -> int:
        return padded(lengths)

    def warm_up(self) -> None:
        for length in _WARM_UP_LENGTHS:
            tokens = self.tokenize(["a " * min(length, self.max_tokens)], "")
            self.forward(tokens, np.zeros(2, np.int64))

    def close(self) -> None:
        self._session = None

    def _batch(self, tokens: Tokens, rows: Rows) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The graph's inputs, int64, rows × longest row."""
        lengths = tokens.lengths[rows]
        places = np.arange(lengths.max())
        # Padded at the end whatever the tokenizer's side is, so that a token's place is what it is in the text alone.
        used = places < lengths[:, np.newaxis]
        batch = {"attention_mask": used.astype(np.int64)}
        if self._facts.excludes_prompt:
            batch[POOLING_MASK] = (used & (places >= (tokens.prompt_tokens or 0))).astype(np.int64)
        for name, column in tokens.columns.items():
            padded = batch[name] = np.full(used.shape, self._facts.fillers[name], np.int64)
            padded[used] = list(chain.from_iterable(column[row] for row in rows.tolist()))
        return {name: batch[name] for name in self._inputs}

    def _count(self, prompt: str) -> int:
        """How many tokens pooling leaves out: the prompt's own, without the special one that ends it."""
        ids = self._tokenize([prompt]).columns["input_ids"][0]
        return len(ids) - (ids[-1] in self._facts.special_ids)


class OnnxInt8Backend(OnnxBackend):
    """The same, its weights int8 by channel and its activations quantised as they come.

    A batch shares the range of its activations, so that a vector depends on its neighbours, within int8's bounds.
    """

    KIND: ClassVar[str] = ONNX_INT8


def open_session(graph: Path, threads: int, *, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    """Load a graph on the CPU.

    Args:
        threads: of this session. A count is given because onnxruntime's own choice ignores the process's affinity.
        optimized: where to write the graph that is executed.

    Raises:
        ModelError: it can't be loaded.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Its threads would wait busily between two operators, on CPUs that the tokeniser of the next chunk needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Plans made for one shape of a batch are of no use to the next.
    options.enable_mem_pattern = False
    options.log_severity_level = _ERRORS_ONLY
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        # Beside the graph, which may not exceed 2 GiB.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no root of their own below it
        raise ModelError(f"onnxruntime {onnxruntime.__version__} can't load {graph}: {error}") from error
