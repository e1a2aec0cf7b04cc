"""Jobs for a real model, on real text. Plain sentence-transformers computes the expected vectors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.chaos.jobs import Expected, Item, Plan
from tests.chaos.options import Options
from tests.support.passages import passages

#: Largest difference of a vector's element (docs/design.md promises 1e-4 between hardware classes).
TOLERANCE = 1e-5
_JOBS = 3
_RECORDS = 20_000
_CANCELLABLE_RECORDS = 2000
_CHUNK_SIZES = (64, 128, 256)


class RealWorkload:
    """A few jobs that share one corpus."""

    def __init__(self, options: Options) -> None:
        self._options = options
        records = options.records or _RECORDS
        self._texts = real_texts(records)
        self._vectors = _reference(options.model, self._texts, options.reference)
        self._bounds = [round(records * part / _JOBS) for part in range(_JOBS + 1)]

    def plan(self, index: int) -> Plan | None:
        if index >= _JOBS:
            return None
        records = self._bounds[index + 1] - self._bounds[index]
        by = ("library", "command")[index % 2]
        return self._plan(index, "real", records, chunk_size=_CHUNK_SIZES[index % len(_CHUNK_SIZES)], by=by)

    def special(self, kind: str, index: int) -> Plan | None:
        if kind != "cancelled":
            return None
        return self._plan(index, "cancelled", min(_CANCELLABLE_RECORDS, len(self._texts)), chunk_size=64)

    def items(self, plan: Plan) -> list[Item]:
        first = self._first(plan)
        return [{"text": text, "id": first + at} for at, text in enumerate(self._texts[first : first + plan.records])]

    def expected(self, plan: Plan) -> Expected:
        first = self._first(plan)
        ids = [str(first + at) for at in range(plan.records)]
        return Expected(self._vectors[first : first + plan.records], {}, ids, tolerance=TOLERANCE)

    def _first(self, plan: Plan) -> int:
        return self._bounds[plan.index] if plan.kind == "real" else 0

    def _plan(self, index: int, kind: str, records: int, *, chunk_size: int, by: str = "library") -> Plan:
        return Plan(
            index=index,
            key=f"chaos {self._options.seed} {kind} {index}",
            kind=kind,
            model=self._options.model,
            hardware="cpu",
            ttl_s=self._options.ttl,
            records=records,
            chunk_size=chunk_size,
            ids="field",
            by=by,
        )


def real_texts(count: int) -> list[str]:
    """Passages of docstrings, plus pairs of passages if there are too few. The order mixes short and long texts."""
    single = passages(count)
    texts = list(single)
    step = 1
    while len(texts) < count:
        texts += [f"{single[at]} {single[at + step]}" for at in range(0, len(single) - step, 2)]
        step += 1
    return [texts[at] for at in np.random.default_rng(0).permutation(count)]


def _reference(model: str, texts: list[str], cache: Path | None) -> npt.NDArray[np.float32]:
    """The vectors of sentence-transformers in fp32. They come from the cache file if it matches texts and model."""
    made_of = hashlib.sha256("\0".join([model, *texts]).encode()).hexdigest()
    if cache is not None and cache.exists():
        with np.load(cache) as stored:
            if str(stored["made_of"]) == made_of:
                kept: npt.NDArray[np.float32] = stored["vectors"]
                return kept
    from sentence_transformers import SentenceTransformer

    from embedctl_workers.models.files import resolve_model

    encoder = SentenceTransformer(str(resolve_model(model).folder), device="cpu")
    vectors = np.asarray(encoder.encode(texts, batch_size=32, normalize_embeddings=True), np.float32)
    if cache is not None:
        with cache.open("wb") as stream:
            np.savez(stream, made_of=made_of, vectors=vectors)
    return vectors
