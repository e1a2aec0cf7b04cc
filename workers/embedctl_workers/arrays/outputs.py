"""What a model gives of texts if a job asks for other outputs than the dense vector alone.

Then each row is a row of *cells*, one for each output asked for, in their order: the dense vector (float32), the
weights (:data:`WEIGHT`, by ascending index), the vectors of the tokens (float32, tokens × width). All cells of a row
that failed are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl_config.outputs import PLAIN, Multi, Output, Sparse
from embedctl_workers.arrays.halves import halved
from embedctl_workers.arrays.tokens import SCORED, Cells, Found, Ragged, Rows, Tokens, Vectors
from embedctl_workers.arrays.vectors import unit

#: A weight of a sparse vector, and the word of the vocabulary that it belongs to.
WEIGHT = np.dtype([("index", "<u4"), ("weight", "<f4")])
#: One output of texts: the weights of each, or the vectors of its tokens, float32.
Column = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """Vectors of tokens, tokens × width, and where those of each text end."""

    vectors: Vectors
    ends: Rows


#: What a backend made of texts: dense vectors, texts × dim; or each output that the texts ask for.
Computed = Vectors | Mapping[Output, Vectors | Column | TokenVectors]


def nothing(rows: int, outputs: Sequence[Output], dim: int) -> Found:
    """Rows that have no vectors."""
    if outputs == PLAIN:
        return np.full((rows, dim), np.nan, np.float32)
    return np.full((rows, len(outputs)), None, object)


def cells_of(columns: Sequence[Sequence[npt.NDArray[Any]]]) -> Cells:
    """Cells of these columns, each an array for each row."""
    cells = np.full((len(columns[0]), len(columns)), None, object)
    for column, arrays in enumerate(columns):
        for row, array in enumerate(arrays):
            cells[row, column] = array
    return cells


def finished(computed: Computed, *, normalize: bool) -> Found:
    """Rows of these outputs, whose vectors have length 1 if `normalize`."""
    if isinstance(computed, np.ndarray):
        return unit(computed) if normalize else computed
    return cells_of([_column(each, normalize=normalize) for each in computed.values()])


def _column(found: Vectors | Column | TokenVectors, *, normalize: bool) -> Column:
    if isinstance(found, TokenVectors):
        return np.split(unit(found.vectors) if normalize else found.vectors, found.ends[:-1])
    return list(unit(found) if normalize else found) if isinstance(found, np.ndarray) else found


def cells_of_weights(whole: Vectors) -> Column:
    """The weights that are not 0, of each row of a matrix of all words."""
    return [weights_of(words := np.flatnonzero(row), row[words]) for row in whole]


def largest_weights(weights: Vectors, ids: Ragged, unused: Sequence[int]) -> Column:
    """The weights of the words that texts have, by the weight of each token: the largest one of a word. The words that
    are unused have none, nor has one of 0."""
    kept = ~(weights <= 0) & ~np.isin(ids.values, unused)  # NaN is kept: it is to be seen
    found = []
    for begin, end in pairwise(ids.offsets):
        part = slice(begin, end)
        words, at = np.unique(ids.values[part][kept[part]], return_inverse=True)
        largest = np.zeros(len(words), np.float32)
        with np.errstate(invalid="ignore"):
            np.maximum.at(largest, at, weights[part][kept[part]])
        found.append(weights_of(words, largest))
    return found


def computed_of(found: Mapping[Output, Vectors], tokens: Tokens, rows: Rows, unused: Sequence[int] = ()) -> Computed:
    """What texts ask for, of a device's numbers: dense vectors; of each text the weights of all words, or the weight of
    each token; the vectors of all tokens. `unused` as :func:`largest_weights`."""
    if tokens.outputs == PLAIN:
        return found[Output.DENSE]
    computed: dict[Output, Vectors | Column | TokenVectors] = {}
    for output in tokens.outputs:
        numbers = found[output]
        if output == Output.MULTI:
            scored = scored_in(tokens, rows)
            computed[output] = token_vectors(numbers[scored], scored, tokens.lengths[rows])
        elif output == Output.SPARSE:
            ids = tokens.columns["input_ids"].select(rows)
            computed[output] = largest_weights(numbers, ids, unused) if numbers.ndim == 1 else cells_of_weights(numbers)
        else:
            computed[output] = numbers
    return computed


def scored_in(tokens: Tokens, rows: Rows) -> npt.NDArray[np.bool_]:
    """Which of all tokens of these texts have a vector in a multi-vector: all but a text's first one, if texts do not
    say."""
    if SCORED in tokens.columns:
        return tokens.columns[SCORED].select(rows).values.astype(bool)
    ids = tokens.columns["input_ids"].select(rows)
    scored = np.ones(len(ids.values), bool)
    scored[ids.offsets[:-1]] = False
    return scored


def token_vectors(vectors: Vectors, scored: npt.NDArray[np.bool_], lengths: Rows) -> TokenVectors:
    """The multi-vectors of texts of these lengths, of the vectors of their scored tokens."""
    return TokenVectors(vectors, np.cumsum(scored, dtype=np.int64)[np.cumsum(lengths) - 1])


def weights_of(indices: npt.NDArray[Any], weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The cell of a sparse vector."""
    cell = np.empty(len(indices), WEIGHT)
    cell["index"], cell["weight"] = indices, weights
    return cell


def normalized(found: Found) -> Found:
    """The same with vectors of length 1, and weights as they are."""
    if found.dtype != object:
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))
    cells = np.empty_like(found)
    for at, cell in np.ndenumerate(found):
        is_vector = cell is not None and cell.dtype != WEIGHT
        cells[at] = normalized(np.atleast_2d(cell)).reshape(cell.shape) if is_vector else cell
    return cells


def side_by_side(found: Found, expected: Found) -> tuple[Sequence[Vectors] | Vectors, Sequence[Vectors] | Vectors]:
    """One output of texts, and another finding of the same, as rows of numbers, those of a text equally long: vectors;
    or of cells, the weights of the words that either has, or the vectors of tokens one after the other, then zeros
    where one has fewer. NaN for a text that failed."""
    if found.dtype != object:
        return found, expected
    pairs = [_in_one_order(*each) for each in zip(found, expected, strict=True)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _in_one_order(found: npt.NDArray[Any] | None, expected: npt.NDArray[Any]) -> tuple[Vectors, Vectors]:
    if found is None:
        return np.full(1, np.nan, np.float32), np.zeros(1, np.float32)
    if expected.dtype == WEIGHT:
        words = np.union1d(found["index"], expected["index"])
        return _weights_at(words, found), _weights_at(words, expected)
    size = max(found.size, expected.size)
    return np.pad(found.reshape(-1), (0, size - found.size)), np.pad(expected.reshape(-1), (0, size - expected.size))


def _weights_at(words: npt.NDArray[Any], cell: npt.NDArray[Any]) -> Vectors:
    weights = np.zeros(len(words), np.float32)
    weights[np.searchsorted(words, cell["index"])] = cell["weight"]
    return weights


def finite(found: Found) -> npt.NDArray[np.bool_]:
    """Which rows hold neither infinity nor NaN."""
    if found.dtype != object:
        return np.asarray(np.isfinite(found).all(axis=1))
    return np.array([all(map(_is_finite, row)) for row in found], bool)


def _is_finite(cell: npt.NDArray[Any] | None) -> bool:
    return cell is not None and bool(np.isfinite(cell["weight"] if cell.dtype == WEIGHT else cell).all())


@dataclass(frozen=True, slots=True)
class Apart:
    """The outputs of rows, each by itself, as results hold them: numbers are float32, or float16 where that is exact
    enough and asked for. `dense`, rows × dim, has no columns if it was not asked for."""

    dense: npt.NDArray[np.floating[Any]]
    sparse: Sparse | None = None
    multi: Multi | None = None


def taken_apart(
    found: Found, outputs: Sequence[Output], dim: int, widths: Mapping[Output, int], *, float16: bool
) -> Apart:
    """Take rows apart: `dim` is the length of a dense vector, and `widths` are those of the other outputs, if any."""
    if found.dtype != object:
        return Apart(_numbers(found, float16=float16))
    columns = dict(zip(outputs, found.T, strict=True))
    dense = np.full((len(found), dim if Output.DENSE in columns else 0), np.nan, np.float32)
    for row, cell in enumerate(columns.get(Output.DENSE, ())):
        if cell is not None:
            dense[row] = cell
    sparse = multi = None
    if (column := columns.get(Output.SPARSE)) is not None:
        whole = _joined(column, np.empty(0, WEIGHT))
        sparse = Sparse(
            widths.get(Output.SPARSE, 0), _counts(column), whole["index"].tobytes(), whole["weight"].tobytes()
        )
    if (column := columns.get(Output.MULTI)) is not None:
        width = widths.get(Output.MULTI, 0)
        numbers = _numbers(_joined(column, np.empty((0, width), np.float32)), float16=float16)
        multi = Multi(width, _counts(column), numbers.tobytes(), numbers.dtype.str)
    return Apart(_numbers(dense, float16=float16), sparse, multi)


def _numbers(vectors: Vectors, *, float16: bool) -> npt.NDArray[np.floating[Any]]:
    halves = halved(vectors) if float16 else None
    return vectors.astype("<f4", copy=False) if halves is None else halves


def _joined(column: Cells, nothing: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([nothing, *(cell for cell in column if cell is not None)])


def _counts(column: Cells) -> list[int]:
    return [0 if cell is None else len(cell) for cell in column]
