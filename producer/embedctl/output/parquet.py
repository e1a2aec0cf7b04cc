"""`.parquet`: one row per record, in input order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from embedctl.output.about import ABOUT, About
from embedctl.output.numbers import FLOAT32, Numbers
from embedctl.output.parts import BeginAgain, part_of, publish
from embedctl.results import ChunkVectors
from embedctl_config.errors import MissingExtra

try:
    from embedctl.output.columns import KeptColumns
    from embedctl.output.growing import GrowingFile, cut_to
    from embedctl.output.row_groups import Layout
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error


class ParquetWriter:
    """Writes the columns of :class:`Layout`."""

    needs_total = False

    def __init__(
        self,
        path: Path,
        records: int,
        noted: Mapping[str, int] | None,
        keep: Sequence[str] = (),
        numbers: Numbers = FLOAT32,
        *,
        tokens: bool = False,
        about: Callable[[], About] | None = None,
    ) -> None:
        self._path = path
        self._numbers = numbers
        self._tokens = tokens
        self._about = about
        self._file: GrowingFile | None = None
        self._kept = KeptColumns(keep)
        #: Chunks given, and those of them that are in whole row groups.
        self._chunks = self._whole = 0
        if noted is not None:
            ends, facts = cut_to(part_of(path), noted["size"])
            self._kept = KeptColumns(keep, facts["kept"])
            layout = self._layout(facts["dim"])
            if layout.facts() != facts:
                raise ValueError("it has other columns")
            self._file = GrowingFile(part_of(path), layout, ends)
            self._chunks = self._whole = noted["chunks"]

    def write(self, chunk: ChunkVectors) -> None:
        if len(chunk.positions):  # otherwise the dimensions may not be known yet
            self._add(chunk)
        self._chunks += 1
        if self._file is not None and self._file.is_whole:
            self._whole = self._chunks

    def checkpoint(self) -> Mapping[str, int] | None:
        """None before the first row group."""
        if self._file is None or not self._file.size:
            return None
        self._file.sync()
        return {"size": self._file.size, "chunks": self._whole}

    def finish(self) -> list[Path]:
        file = self._file or self._begun(0)
        if self._about is not None:
            file.describe(ABOUT, self._about().text)
        file.close()
        publish(self._path)
        return [self._path]

    def close(self) -> None:
        """Write all chunks given, so that the file can be read as it is."""
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        part_of(self._path).unlink(missing_ok=True)

    def _add(self, chunk: ChunkVectors) -> None:
        if self._kept.widened_by(chunk.kept or [{}] * len(chunk.positions)) and self._file is not None:
            self._file = None
            self._chunks = self._whole = 0
            raise BeginAgain
        if self._file is None:
            self._file = self._begun(chunk.vectors.shape[1])
        self._file.add(chunk)

    def _begun(self, dim: int) -> GrowingFile:
        part_of(self._path).unlink(missing_ok=True)  # it might be a link to another file
        return GrowingFile(part_of(self._path), self._layout(dim))

    def _layout(self, dim: int) -> Layout:
        return Layout(dim, self._kept, self._numbers, tokens=self._tokens, digests=self._about is not None)
