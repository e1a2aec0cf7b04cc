"""A model by `transformers` alone: its tokenizer with padding, its forward pass, and pooling by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from .serving import Vectors


class TransformersAdapter:
    """A request as one batch, on torch in fp32, with mean or CLS pooling; RuntimeError for any other pooling."""

    computes = "fp32"

    def __init__(self, model: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(model, local_files_only=True, dtype=torch.float32).eval()
        self._cls = pooling_of(model) == "cls"
        limits = model / "sentence_bert_config.json"
        limit = json.loads(limits.read_text()).get("max_seq_length") if limits.is_file() else None
        self._most = limit or self._model.config.max_position_embeddings

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Tokenise, run, pool, and scale to unit length."""
        inputs = self._tokenize(texts)
        with torch.inference_mode():
            hidden = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            pooled = hidden[:, 0] if self._cls else (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors: Vectors = torch.nn.functional.normalize(pooled, p=2, dim=1).numpy()
        return vectors

    def count(self, texts: Sequence[str]) -> int:
        """After truncation."""
        return int(self._tokenize(texts)["attention_mask"].sum())

    def _tokenize(self, texts: Sequence[str]) -> Any:
        return self._tokenizer(list(texts), padding=True, truncation=True, max_length=self._most, return_tensors="pt")


def pooling_of(folder: Path) -> str:
    """`mean` or `cls`, as the model's folder says; `mean` if it says nothing."""
    path = folder / "1_Pooling" / "config.json"
    facts = json.loads(path.read_text()) if path.is_file() else {"pooling_mode": "mean"}
    modes = [name for name in ("cls_token", "mean_tokens") if facts.get(f"pooling_mode_{name}")]
    mode = facts.get("pooling_mode") or (modes[0].partition("_")[0] if len(modes) == 1 else "")
    if mode not in ("cls", "mean"):
        raise RuntimeError(f"{path} asks for a pooling other than mean and cls, and this system knows only these two")
    return str(mode)
