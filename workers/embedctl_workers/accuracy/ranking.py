"""How far rankings of a small retrieval set are from those of other vectors, such as the model's in fp32."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl_config.errors import GateFailed, ModelError
from embedctl_config.hardware import ModelEntry, Precision
from embedctl_config.outputs import PLAIN, Output, outputs_of
from embedctl_config.wire import ChunkInput
from embedctl_workers.arrays.tokens import Rows, Vectors
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.backends import load_backend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import locked, note, noted, path_of, private_folder
from embedctl_workers.models.files import ModelFiles

#: How many passages of a ranking are compared.
BEST = 10
#: The least overlap of rankings by sparse vectors and multi-vectors with those in fp32, by precision. On an AMD
#: EPYC Zen 4, random heads on all-MiniLM-L6-v2 have 0.99 in bf16 and 0.96 in int8; small models of random weights,
#: to which passages are nearly equal, 0.95 and 0.91.
LEAST_OVERLAP: Mapping[Precision, float] = {"fp16": 0.9, "int8": 0.85}
#: 30 queries, each before four passages: one that answers it, and others near it.
_BLOCKS = (files("embedctl_workers.accuracy") / "retrieval.txt").read_text(encoding="utf-8").strip().split("\n\n")
QUERIES = [block.split("\n")[0] for block in _BLOCKS]
PASSAGES = [passage for block in _BLOCKS for passage in block.split("\n")[1:]]

#: Scores, float32, queries × passages.
Scores = npt.NDArray[np.float32]
#: What a model gives of the queries, and of the passages: each text's dense vector, float32, or its cell.
Sides = tuple[Sequence[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the first :data:`BEST` passages of each query are those of a reference, as means over the queries.

    Attributes:
        overlap: how many of them are the reference's, of :data:`BEST` (Fagin, Kumar, Sivakumar: Comparing top k lists,
            SIAM J. Discrete Math. 17, 2003).
        ndcg: nDCG (Järvelin, Kekäläinen: Cumulated gain-based evaluation of IR techniques, ACM TOIS 20, 2002). The
            gain of the reference's first passage is BEST, of its second one BEST - 1, and so on, and 0 of all others.
        least: the bound of `overlap`; 0: none.
    """

    output: Output
    overlap: float
    ndcg: float
    least: float = 0.0

    @property
    def passed(self) -> bool:
        return self.overlap >= self.least

    def __str__(self) -> str:
        bound = f" (bound {self.least:.2f}: {'ok' if self.passed else 'FAILED'})" if self.least else ""
        return (
            f"ranking by {self.output} vectors: overlap@{BEST} {self.overlap:.3f}{bound}, nDCG@{BEST} {self.ndcg:.3f}"
        )


def agreement(output: Output, found: Rows, reference: Rows, least: float = 0.0) -> Agreement:
    """Compare rankings of :func:`ranked`, queries × BEST."""
    same = found[:, :, np.newaxis] == reference[:, np.newaxis, :]
    gains = same @ np.arange(BEST, 0, -1)
    discounts = 1 / np.log2(np.arange(BEST) + 2)
    ideal = (np.arange(BEST, 0, -1) * discounts).sum()
    return Agreement(output, float((gains > 0).mean()), float((gains @ discounts).mean() / ideal), least)


def ranked(scores: Scores) -> Rows:
    """The best passages of each query, best first, queries × BEST; of equal ones, the first."""
    best: Rows = np.argsort(-scores, axis=1, kind="stable")[:, :BEST]
    return best


def _by_cosine(queries: Sequence[Vectors], passages: Sequence[Vectors]) -> Scores:
    """The cosines of dense vectors."""
    scores: Scores = unit(np.stack(queries)) @ unit(np.stack(passages)).T
    return scores


def _by_dot(queries: Sequence[Any], passages: Sequence[Any]) -> Scores:
    """The products of sparse vectors."""
    words = np.unique(np.concatenate([cell["index"] for cell in queries]))

    def rows(cells: Sequence[Any]) -> Vectors:
        found = np.zeros((len(cells), len(words)), np.float32)
        for row, cell in zip(found, cells, strict=True):
            shared = cell[np.isin(cell["index"], words)]
            row[np.searchsorted(words, shared["index"])] = shared["weight"]
        return found

    scores: Scores = rows(queries) @ rows(passages).T
    return scores


def _by_max_sim(queries: Sequence[Any], passages: Sequence[Any]) -> Scores:
    """For each token of a query its best product with a token of the passage, in sum (Khattab, Zaharia: ColBERT, SIGIR
    2020)."""
    return np.array([[(a @ b.T).max(axis=1).sum() for b in passages] for a in queries], np.float32)


_SCORES: Mapping[Output, Callable[[Any, Any], Scores]] = {
    Output.DENSE: _by_cosine,
    Output.SPARSE: _by_dot,
    Output.MULTI: _by_max_sim,
}


def ranking(output: Output, sides: Sides) -> Rows:
    """The best passages of each query, as :func:`ranked`."""
    return ranked(_SCORES[output](*sides))


def encoded(encoder: ChunkEncoder, outputs: Sequence[Output]) -> dict[Output, Sides]:
    """What a model gives of the queries and of the passages, by output. GateFailed if it fails with one of them."""
    query = {"prompt_name": "query"} if "query" in encoder.prompts else {}
    outputs = outputs_of(outputs)  # in the order of the cells
    sides = _cells(encoder, QUERIES, outputs, query), _cells(encoder, PASSAGES, outputs, {})
    return {output: (sides[0][at], sides[1][at]) for at, output in enumerate(outputs)}


def _cells(encoder: ChunkEncoder, texts: Sequence[str], outputs: Sequence[Output], options: Mapping[str, str]) -> Any:
    chunk = ChunkInput(0, bytes(len(texts)), [text.encode() for text in texts])
    found = encoder.encode(encoder.prepare(chunk, {"vectors": list(outputs), **options}))
    for error in found.errors:
        raise GateFailed(f"the text {texts[error.row]!r} of the retrieval set can't be encoded: {error.message}")
    return [found.vectors] if tuple(outputs) == PLAIN else found.vectors.T


def rankings(encoder: ChunkEncoder, outputs: Sequence[Output]) -> dict[Output, Rows]:
    """The rankings of the retrieval set by each of these outputs; raises as :func:`encoded`."""
    return {output: ranking(output, sides) for output, sides in encoded(encoder, outputs).items()}


def reference_rankings(encoder: ChunkEncoder, host: Host) -> dict[Output, Rows]:
    """The same by all outputs of a model in fp32 on CPUs, kept in the cache. The encoder is of the same model.

    Raises:
        MissingExtra: they are not in the cache, and torch is not installed.
        ModelError: they are not in the cache, and `host.build` forbids computing them; or they can't be kept there.
    """
    assert encoder.backend.reference is not None
    model = encoder.backend.reference.files
    facts = [model.fingerprint, hashlib.sha256("\n\n".join(_BLOCKS).encode()).hexdigest(), BEST]
    found, path = noted(host.cache, "rankings", facts), path_of(host.cache, "rankings", facts)
    if found is None and not host.build:
        raise ModelError(
            f"the rankings of model {model.name!r} are not in {path}, and --no-build forbids computing them: copy the "
            f"file from a machine that has it, or run `embedctl model verify {model.name}`"
        )
    if found is None:
        try:
            private_folder(path.parent)
            with locked(path):  # several workers would each load the model once more
                found = noted(host.cache, "rankings", facts) or _in_fp32(encoder, model, host)
                note(host.cache, "rankings", facts, found)
        except OSError as error:
            raise ModelError(f"the rankings of model {model.name!r} can't be kept in {path}: {error}") from error
    return {Output(output): np.array(best) for output, best in found.items()}


def _in_fp32(encoder: ChunkEncoder, model: ModelFiles, host: Host) -> dict[Output, Any]:
    pooling: Any = model.pooling
    entry = ModelEntry(source=str(model.folder), pooling=pooling)
    fp32 = load_backend("torch", model.name, entry=entry, host=host, options={})
    try:
        prompts = {**encoder.prompts, **fp32.own_prompts}
        found = rankings(ChunkEncoder(fp32, fp32.token_budget, prompts=prompts), fp32.outputs)
    finally:
        fp32.close()
    return {output: best.tolist() for output, best in found.items()}


def agreements(encoder: ChunkEncoder, precision: Precision, host: Host) -> list[Agreement]:
    """How far a loaded model's rankings by sparse vectors and multi-vectors are those in fp32; none of a class that
    promises fp32, whose every number has a bound, and none of dense vectors, which have bounds of their own. Raises as
    :func:`encoded` and :func:`reference_rankings`."""
    others = [output for output in encoder.backend.outputs if output is not Output.DENSE]
    if not others or precision not in LEAST_OVERLAP:
        return []
    expected = reference_rankings(encoder, host)
    found = rankings(encoder, others)
    return [agreement(each, found[each], expected[each], LEAST_OVERLAP[precision]) for each in others]
