"""One part while it is written: chunks of results that go to a parquet file together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl.destinations.loop import BeginAgain
from embedctl.output.about import ABOUT, About
from embedctl.output.numbers import FLOAT32, Numbers
from embedctl.results import ChunkVectors
from embedctl_config.errors import MissingExtra

try:
    import pyarrow.parquet as pq

    from embedctl.output.columns import KeptColumns
    from embedctl.output.row_groups import FACTS, Layout, RowGroupFile
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error

#: The entry of a part's footer that says what the part holds.
FOOTER = "embedctl"
#: Most bytes of results in a part, which keeps the file below 512 MB.
MOST_BYTES = 448 * 1024 * 1024
#: Most chunks in a part: Redis notes all of them in one step.
MOST_CHUNKS = 10_000


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of a chunk, read from Redis.

    Attributes:
        chunk: its number.
        of_corpus: whether the chunks of the corpus came in order up to this one.
        more: the chunks of retried records that are laid over it.
        size: what all these results take in Redis (bytes).
        digest: of the chunk's input.
        made_by: the backend.
    """

    chunk: int
    of_corpus: bool
    vectors: ChunkVectors
    more: tuple[int, ...]
    size: int
    digest: bytes
    made_by: str

    @property
    def weight(self) -> int:
        """About how many bytes it adds to a file."""
        return max(self.size, self.vectors.vectors.nbytes)


class OpenPart:
    """A part that is being written.

    Args:
        path: the file; one that exists is overwritten.
        kept: the columns of the kept fields, of all parts of this drain: types only become wider.
        numbers: how vectors are stored.
        tokens: whether the job counts the tokens of each record.
        digests: whether it has digests.
        of_corpus: whether it holds consecutive chunks of the corpus; otherwise any others.
    """

    def __init__(
        self,
        path: Path,
        kept: KeptColumns,
        numbers: Numbers = FLOAT32,
        *,
        tokens: bool = False,
        digests: bool = False,
        of_corpus: bool = True,
    ) -> None:
        self.path, self.of_corpus = path, of_corpus
        self._kept = kept
        self._numbers = numbers
        self._tokens = tokens
        self._digested = digests
        self._file: RowGroupFile | None = None
        self.chunks: list[int] = []
        self._rows: list[tuple[int, int]] = []
        self.more: list[int] = []
        self.bytes = self.records = self._weight = 0
        self._digests: list[bytes] = []
        self._ends: list[int] = []
        self._made: Mapping[str, str] = {}

    def has_room_for(self, taken: Taken, *, most_bytes: int) -> bool:
        """Whether a chunk belongs into it, and it stays within its bounds. The first chunk always does.

        Args:
            most_bytes: what its results may take in Redis.
        """
        if not self.chunks:
            return taken.of_corpus is self.of_corpus
        fits = self.bytes + taken.size <= most_bytes and self._weight + taken.weight <= MOST_BYTES
        follows = taken.chunk == self.chunks[-1] + 1 or not self.of_corpus
        return taken.of_corpus is self.of_corpus and follows and fits and len(self.chunks) < MOST_CHUNKS

    @property
    def digests(self) -> bytes:
        """The digests of its chunks' inputs, one after the other."""
        return b"".join(self._digests)

    def add(self, taken: Taken) -> None:
        """Add a chunk.

        Raises:
            BeginAgain: a column of a kept field needs a wider type, so the part must be written again.
        """
        chunk = taken.vectors
        rows = len(chunk.positions)
        if self._kept.widened_by(chunk.kept or [{}] * rows) and self._file is not None:
            raise BeginAgain
        if self._file is None:
            layout = Layout(
                chunk.vectors.shape[1], self._kept, self._numbers, tokens=self._tokens, digests=self._digested
            )
            self._file = RowGroupFile(self.path, layout)
        self._file.add(chunk)
        self._rows.append((taken.chunk, rows))
        self._ends += (int(chunk.positions[0]), int(chunk.positions[-1]))
        self._made = {"precision": chunk.precision, "bounds": chunk.bounds, "backend": taken.made_by}
        self.records += rows
        self.chunks.append(taken.chunk)
        self.more += taken.more
        self.bytes += taken.size
        self._weight += taken.weight
        self._digests.append(taken.digest)

    def finish(self, job_id: str, about: About) -> None:
        """Write the footer; the file is not synced. The part must hold a chunk."""
        assert self._file is not None
        footer = {
            "job": job_id,
            "fingerprint": about.fingerprint,
            **self._made,
            "first": min(self._ends),
            "last": max(self._ends),
            "records": self.records,
            "chunks": self._rows,
        }
        self._file.describe(FOOTER, json.dumps(footer))
        if self._digested:
            self._file.describe(ABOUT, about.text)
        self._file.close()

    def abandon(self) -> None:
        """Close and remove the file. What it held is still in Redis."""
        if self._file is not None:
            with suppress(OSError, ValueError):  # closing flushes; a full disk refuses once more, a closed file too
                self._file.close()
            self.path.unlink(missing_ok=True)


def footer_of(source: Any) -> Mapping[str, Any]:
    """What a part says of itself; empty if it is no part of embedctl's.

    `vectors` are the facts of its numbers (:meth:`Numbers.facts`).

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        metadata = pq.read_metadata(source).metadata or {}
        found: Mapping[str, Any] = json.loads(metadata[FOOTER.encode()])
        numbers = json.loads(metadata.get(FACTS.encode(), "{}"))
    except FileNotFoundError:
        raise
    except (KeyError, ValueError, OSError):  # pyarrow's errors are ValueError and OSError
        return {}
    return {**found, "vectors": numbers}


def rows_of_chunks(footer: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """For each chunk in a part its number, its first row and the number of its rows."""
    at = 0
    pairs: Sequence[Sequence[int]] = footer["chunks"]
    for chunk, rows in pairs:
        yield chunk, at, rows
        at += rows
