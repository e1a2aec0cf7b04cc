"""CTranslate2's BERT encoder, with the steps that it leaves to its caller: tokenise, sort, batch, pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from ctranslate2 import Encoder, get_supported_compute_types
from tokenizers import Tokenizer

from .serving import Vectors

#: Precisions by CTranslate2's names; the part after the underscore is that of what is not a product.
_KINDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8", "int16": "int16"}


class CTranslate2Adapter:
    """Batches of at most `budget` tokens, sorted by length, so that there is hardly any padding.

    Attributes:
        computes: the precision that was read back from the loaded model.
    """

    def __init__(self, model: Path, threads: int, compute: str = "float32", workers: int = 1) -> None:
        if compute not in (able := get_supported_compute_types("cpu")):
            raise RuntimeError(f"CTranslate2 has no {compute} on this CPU, only {', '.join(sorted(able))}")
        self._encoder = Encoder(
            str(model), device="cpu", compute_type=compute, inter_threads=workers, intra_threads=threads // workers
        )
        products, _, others = str(self._encoder.compute_type).partition("_")
        self.computes = _KINDS.get(products, products) + (f" (the rest in {_KINDS[others]})" if others else "")
        self._threads = ThreadPoolExecutor(workers)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(
            json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"]
        )
        pooling = json.loads((model / "1_Pooling" / "config.json").read_text())
        self._cls = pooling["pooling_mode_cls_token"]
        self._dim = pooling["word_embedding_dimension"]

    def encode(self, texts: Sequence[str], budget: int) -> Vectors:
        """Sort, batch, pool, and scale to unit length."""
        ids = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        vectors = np.empty((len(ids), self._dim), np.float32)

        def fill(rows: list[int]) -> None:
            vectors[rows] = self._pooled([ids[row] for row in rows])

        list(self._threads.map(fill, _batches(ids, budget)))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def count(self, texts: Sequence[str]) -> int:
        """After truncation."""
        return sum(len(each.ids) for each in self._tokenizer.encode_batch(list(texts)))

    def _pooled(self, ids: list[list[int]]) -> Vectors:
        hidden: Vectors = np.array(self._encoder.forward_batch(ids).last_hidden_state, copy=False)
        if self._cls:
            return hidden[:, 0]
        lengths = np.array([len(each) for each in ids])
        weights = (np.arange(hidden.shape[1]) < lengths[:, None]) / lengths[:, None].astype(np.float32)
        pooled: Vectors = np.matmul(weights[:, None, :].astype(np.float32), hidden)[:, 0]
        return pooled


def _batches(ids: list[list[int]], budget: int) -> list[list[int]]:
    """Rows by falling length: the largest batch comes first, so that threads end at about the same time."""
    batches: list[list[int]] = []
    for row in sorted(range(len(ids)), key=lambda row: -len(ids[row])):
        if not batches or (len(batches[-1]) + 1) * len(ids[batches[-1][0]]) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches
