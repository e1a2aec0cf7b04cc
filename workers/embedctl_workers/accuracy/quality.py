"""What smaller vectors of a model cost in ranking."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from embedctl.destinations.numbers import Dtype, Numbers
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import Precision
from embedctl_config.outputs import Output
from embedctl_workers.accuracy.ranking import BEST, Sides, agreement, encoded, ranking, reference_rankings
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host

#: The types that destinations store vectors of each kind in.
_DTYPES: Mapping[Output, Sequence[Dtype]] = {
    Output.DENSE: tuple(Dtype),
    Output.SPARSE: (Dtype.FLOAT32,),
    Output.MULTI: (Dtype.FLOAT32, Dtype.FLOAT16),
}


def quality(
    encoder: ChunkEncoder,
    host: Host,
    precision: Precision,
    dims: Mapping[Output, Sequence[int]],
    dtypes: Collection[str],
) -> Iterator[dict[str, object]]:
    """How far rankings by vectors that are stored in other ways are those by whole float32 vectors in fp32: one
    for each kind in `dims`, each of its dimensions, and each of these types that it is stored in, or else float32.

    Queries are stored like passages, and the ranges of int8 are those of the passages. `bytes` are those of a
    passage's vectors, the mean. Raises SettingsError if there are more dimensions than a dense vector has, and as
    :func:`.ranking.encoded` and :func:`.ranking.reference_rankings`.
    """
    if (most := max(dims.get(Output.DENSE, [0]))) > encoder.backend.dim:
        raise SettingsError(f"--dims {most}: dense vectors of this model have {encoder.backend.dim}")
    found = encoded(encoder, list(dims))
    whole = {output: ranking(output, sides) for output, sides in found.items()}
    expected = whole if precision == "fp32" else reference_rankings(encoder, host)
    for output, sides in found.items():
        for kept in dims[output]:
            for kind in [each for each in _DTYPES[output] if each in dtypes] or [Dtype.FLOAT32]:
                stored, nbytes = _stored(sides, output, kept, kind)
                close = agreement(output, ranking(output, stored), expected[output])
                facts = {"vectors": output.value, "dims": kept, "dtype": kind.value, "bytes": nbytes}
                yield {**facts, f"overlap@{BEST}": close.overlap, f"nDCG@{BEST}": close.ndcg}


def _stored(sides: Sides, output: Output, dims: int, kind: Dtype) -> tuple[Sides, float]:
    """The vectors of both sides as a reader gets them, and the bytes of a passage's, the mean."""
    if output is Output.SPARSE:
        return sides, float(np.mean([cell.nbytes for cell in sides[1]]))
    if output is Output.MULTI:
        rounded = [[cell.astype(kind.value) for cell in side] for side in sides]
        restored = [[cell.astype(np.float32) for cell in side] for side in rounded]
        return (restored[0], restored[1]), float(np.mean([cell.nbytes for cell in rounded[1]]))
    whole = [np.stack(side) for side in sides]
    queries, passages = (unit(side[:, :dims]) if dims < side.shape[1] else side for side in whole)
    numbers = Numbers(kind, np.stack([passages.min(axis=0), passages.max(axis=0)]))
    stored = [numbers.of(queries), numbers.of(passages)]
    near = [list(numbers.restored(each, dims)) for each in stored]
    return (near[0], near[1]), stored[1][0].nbytes
