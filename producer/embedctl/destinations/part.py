"""One part while it is written: chunks of results that go to a parquet file together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedctl.destinations.held import Held, Taken
from embedctl.destinations.parquet import FACTS, KeptColumns, ParquetWriter, pq
from embedctl.destinations.writer import Content
from embedctl.waiting.results import FailedRecord

#: The entry of a part's footer that says what the part holds.
FOOTER = "embedctl"
#: Most bytes of results in a part, which keeps the file below 512 MB.
MOST_BYTES = 448 * 1024 * 1024


class OpenPart(Held):
    """A part that is being written: of consecutive chunks of the corpus, or of any others. `kept` are the columns of
    the kept fields, of all parts of this drain, because types only become wider."""

    def __init__(self, content: Content, kept: KeptColumns, *, of_corpus: bool) -> None:
        super().__init__(of_corpus=of_corpus)
        self._file, self._numbers = ParquetWriter(content, kept), content.numbers
        self._rows: list[tuple[int, int]] = []
        self.refused: list[FailedRecord] = []
        self.records = self._weight = 0
        self._ends: list[int] = []
        self._made: Mapping[str, str] = {}

    def has_room_for(self, taken: Taken, *, most_bytes: int) -> bool:
        fits = not self.chunks or self._weight + taken.weight <= MOST_BYTES
        return fits and super().has_room_for(taken, most_bytes=most_bytes)

    def add(self, taken: Taken) -> None:
        """Add a chunk. BeginAgain: as :meth:`ParquetWriter.write`."""
        chunk, refused = self._numbers.fitting(taken.vectors)
        rows = len(chunk.positions)
        self._file.write(chunk)
        self._rows.append((taken.chunk, rows))
        self._ends += (int(chunk.positions[0]), int(chunk.positions[-1]))
        self._made = {"precision": chunk.precision, "bounds": chunk.bounds, "backend": taken.made_by}
        self.records += rows
        self.refused += refused
        self._weight += taken.weight
        super().add(taken)

    def finish(self, job_id: str, fingerprint: str) -> None:
        """Write the footer; the file is not synced. The part must hold a chunk."""
        footer = {
            "job": job_id,
            "fingerprint": fingerprint,
            **self._made,
            "first": min(self._ends),
            "last": max(self._ends),
            "records": self.records,
            "refused": len(self.refused),
            "chunks": self._rows,
        }
        self._file.end(**{FOOTER: json.dumps(footer)})

    def abandon(self) -> None:
        """Close and remove the file. What it held is still in Redis."""
        self._file.discard()


def footer_of(source: Any) -> Mapping[str, Any]:
    """What a part says of itself; empty if it is no part of embedctl's. `vectors` are the facts of its numbers
    (:meth:`Numbers.facts`). FileNotFoundError: there is no such file."""
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
