"""Turns texts into the inputs of a model's graph, from the facts in its artefact. Needs no runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from embedctl_config.outputs import PLAIN, Output, outputs_of
from embedctl_workers.arrays.late import LateRules, LateTexts
from embedctl_workers.arrays.padding import Padding
from embedctl_workers.arrays.tokenizing import TextTokenizer
from embedctl_workers.arrays.tokens import SCORED, Rows, Side, Tokens
from embedctl_workers.backends.base import Backend, Reference
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.wordpiece.load import fast_tokenizer_for

#: The files of an artefact.
GRAPH, MODEL, TOKENIZER = "model.onnx", "model.json", "tokenizer.json"
#: The graph's output, and the extra input of models that leave the prompt out of pooling.
OUTPUT, POOLING_MASK = "sentence_embedding", "pooling_mask"

#: A graph's inputs by name, int64, rows × width.
Batch = Mapping[str, np.ndarray[Any, Any]]


def name_of(output: Output, outputs: tuple[Output, ...]) -> str:
    """The name of one of the outputs of a model's graph: a vector of each text, or numbers of each of its tokens."""
    of_texts = output == Output.DENSE or outputs == (Output.SPARSE,)
    return OUTPUT if of_texts else output.value


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that its graph does not hold."""

    dim: int
    max_tokens: int  #: most tokens of a text, special ones included
    keep: Literal["left", "right"]  #: the end of an over-long text that is kept
    fillers: Mapping[str, int]  #: input → its padding value
    prompt: str  #: put before each text if the job sets no prompt
    excludes_prompt: bool  #: whether pooling leaves out the prompt's tokens; the graph then has an input with a mask
    special_ids: Sequence[int]  #: the tokenizer's, sorted
    outputs: tuple[Output, ...] = PLAIN
    widths: Mapping[Output, int] = field(default_factory=dict)  #: as :attr:`~.base.Backend.widths`
    late: LateRules | None = None  #: of a model that gives multi-vectors alone
    unused: Sequence[int] = ()  #: tokens that never have a weight

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        facts = json.loads((folder / MODEL).read_text(encoding="utf-8"))
        late = LateRules(**facts["late"]) if facts.get("late") else None
        widths = {Output(name): width for name, width in facts.get("widths", {}).items()}
        return cls(**{**facts, "outputs": outputs_of(facts.get("outputs", PLAIN)), "widths": widths, "late": late})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


class GraphInputs:
    """Tokenises texts once, unpadded, and makes batches of them for a graph with inputs of these names."""

    def __init__(self, folder: Path, names: Sequence[str], host: Host) -> None:
        self.facts = ModelFacts.read(folder)
        self._names = names
        self._padding = Padding({"attention_mask": 0, SCORED: 0, **self.facts.fillers})
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        columns, keep = [name for name in names if name in self.facts.fillers], self.facts.keep
        late = self.facts.late
        self.late = None if late is None else LateTexts(late, tokenizer, columns, keep)
        self._tokenize = TextTokenizer(
            tokenizer,
            max_tokens=self.facts.max_tokens,
            columns=columns,
            keep=keep,
            fast=fast_tokenizer_for(tokenizer, host),
        )

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        """As :meth:`~embedctl_workers.backends.base.Backend.tokenize`."""
        outputs = PLAIN if Output.DENSE in self.facts.outputs else self.facts.outputs
        if self.late is not None:
            return replace(self.late(texts, prompt, truncation_side), outputs=outputs)
        prompt = self.facts.prompt if prompt is None else prompt
        tokens = self._tokenize([prompt + text for text in texts] if prompt else texts, truncation_side)
        leaves_out = prompt and self.facts.excludes_prompt
        return replace(tokens, prompt_tokens=self._count(prompt) if leaves_out else None, outputs=outputs)

    def batch(self, tokens: Tokens, rows: Rows, width: int = 0) -> Batch:
        """The graph's inputs for some of the texts, in rows of `width` tokens; 0: of the longest row's."""
        batch = self._padding(tokens, rows, width or int(tokens.lengths[rows].max()))
        if self.facts.excludes_prompt:
            batch[POOLING_MASK] = batch["attention_mask"].copy()
            batch[POOLING_MASK][:, : tokens.prompt_tokens or 0] = 0
        return {name: batch[name] for name in self._names}

    def _count(self, prompt: str) -> int:
        """The number of tokens that pooling leaves out: the prompt's, without the special token at its end."""
        ids = self._tokenize([prompt]).columns["input_ids"][0]
        return len(ids) - (ids[-1] in self.facts.special_ids)


class GraphBackend(Backend):
    """The base of backends that run a model's graph: its artefact holds all they need."""

    def __init__(self, files: ModelFiles, folder: Path, names: Sequence[str], host: Host) -> None:
        self.fingerprint = files.fingerprint
        self.reference = Reference(files)
        self._inputs = GraphInputs(folder, names, host)
        facts = self._inputs.facts
        self.dim, self.max_tokens, self.outputs, self.widths = facts.dim, facts.max_tokens, facts.outputs, facts.widths
        if (late := self._inputs.late) is not None:
            self.own_prompts = late.prompts

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        return self._inputs.tokenize(texts, prompt, truncation_side)
