"""sentence-transformers on torch: the reference that every other backend is measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedTokenizerFast

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.backends.base import Rows, Tokens, Vectors
from embedctl_workers.models import ModelFiles, resolve_model

_WARM_UP_LENGTHS = (8, 32, 128, 256)


class TorchBackend:
    """A sentence-transformers model in fp32 on the CPU.

    Texts are tokenised once, unpadded; each batch is padded to its own longest row. Everything after tokenising is
    the model's own modules, so vectors are those of `SentenceTransformer.encode`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, files: ModelFiles, threads: int) -> None:
        torch.set_num_threads(threads)
        self.fingerprint = files.fingerprint
        self._model = _load(files)
        self._tokenizer = _fast_tokenizer(self._model, files)
        self._padding = {
            "input_ids": self._tokenizer.pad_token_id or 0,
            "attention_mask": 0,
            "token_type_ids": self._tokenizer.pad_token_type_id,
        }
        self._prompt_tokens: dict[str, int | None] = {}
        dim = self._model.get_embedding_dimension()
        if dim is None:
            raise ModelError(f"model {files.name!r} does not say how long its vectors are")
        self.dim = dim
        self.max_tokens = int(self._model.max_seq_length or self._tokenizer.model_max_length)

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, threads: int, options: Mapping[str, Any]) -> Self:
        return cls(resolve_model(model, entry), threads)

    def tokenize(self, texts: Sequence[str], prompt: str | None) -> Tokens:
        if prompt is None and self._model.default_prompt_name is not None:
            prompt = self._model.prompts.get(self._model.default_prompt_name)
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        columns = self._tokenizer(prompted, truncation="longest_first", max_length=self.max_tokens)
        lost = [
            sum(len(part.ids) - sum(part.special_tokens_mask) for part in encoding.overflowing)
            for encoding in columns.encodings or []
        ]
        return Tokens(
            lengths=np.array([len(ids) for ids in columns["input_ids"]], np.int64),
            lost=np.array(lost, np.int64),
            columns=dict(columns),
            prompt_tokens=self._count_prompt_tokens(prompt) if prompt else None,
        )

    def forward(self, tokens: Tokens, rows: Rows) -> torch.Tensor:
        features: dict[str, Any] = {
            name: torch.from_numpy(self._padded(column, rows, self._padding[name]))
            for name, column in tokens.columns.items()
        }
        features["modality"] = "text"
        if tokens.prompt_tokens is not None:
            features["prompt_length"] = tokens.prompt_tokens
        with torch.inference_mode():
            output: torch.Tensor = self._model(features)["sentence_embedding"]
        return output

    def finish(self, output: torch.Tensor, *, normalize: bool) -> Vectors:
        with torch.inference_mode():
            vectors = output.float()
            if normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2, dim=1)
            return vectors.numpy(force=True)

    def warm_up(self) -> None:
        for length in _WARM_UP_LENGTHS:
            tokens = self.tokenize(["a " * min(length, self.max_tokens)], "")
            self.finish(self.forward(tokens, np.zeros(2, np.int64)), normalize=True)

    def close(self) -> None:
        del self._model

    def _padded(self, column: Sequence[Sequence[int]], rows: Rows, filler: int) -> np.ndarray[Any, Any]:
        picked = [column[row] for row in rows]
        width = max(map(len, picked))
        padded = np.full((len(picked), width), filler, np.int64)
        left = self._tokenizer.padding_side == "left"
        for target, ids in zip(padded, picked, strict=True):
            target[width - len(ids) if left else 0 : width if left else len(ids)] = ids
        return padded

    def _count_prompt_tokens(self, prompt: str) -> int | None:
        """How many tokens pooling leaves out, by the model's own account; None where it leaves out none."""
        if prompt not in self._prompt_tokens:
            length: Any = self._model.preprocess(["a"], prompt=prompt).get("prompt_length")
            self._prompt_tokens[prompt] = length
        return self._prompt_tokens[prompt]


def _load(files: ModelFiles) -> SentenceTransformer:
    try:
        model = SentenceTransformer(
            str(files.folder),
            device="cpu",
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": torch.float32},
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError(f"model {files.name!r} in {files.folder} can't be loaded: {error}") from error
    return model.eval()


def _fast_tokenizer(model: SentenceTransformer, files: ModelFiles) -> PreTrainedTokenizerFast:
    tokenizer = getattr(model, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not model.supports("text"):
        raise ModelError(
            f"model {files.name!r}: this backend needs a text model with a fast tokenizer (tokenizer.json), not "
            f"{type(tokenizer).__name__}"
        )
    return tokenizer
