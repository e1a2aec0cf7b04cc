"""`.parquet`: one row per record, in input order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from embedctl.output.about import ABOUT
from embedctl.output.parts import BeginAgain, part_of, publish
from embedctl.output.writer import Content
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

    def __init__(self, content: Content) -> None:
        self._content = content
        self._file: GrowingFile | None = None
        self._kept = KeptColumns(content.keep)
        #: Chunks given, and those of them that are in whole row groups.
        self._chunks = self._whole = 0
        if (noted := content.noted) is not None:
            ends, facts = cut_to(self._part, noted["size"])
            self._kept = KeptColumns(content.keep, facts["kept"])
            layout = self._layout(facts["dim"])
            if layout.facts() != facts:
                raise ValueError("it has other columns")
            self._file = GrowingFile(self._part, layout, ends)
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
        if self._content.about is not None:
            file.describe(ABOUT, self._content.about().text)
        file.close()
        publish(self._content.path)
        return [self._content.path]

    def close(self) -> None:
        """Write all chunks given, so that the file can be read as it is."""
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        self._part.unlink(missing_ok=True)

    @property
    def _part(self) -> Path:
        return part_of(self._content.path)

    def _add(self, chunk: ChunkVectors) -> None:
        if self._kept.widened_by(chunk.kept or [{}] * len(chunk.positions)) and self._file is not None:
            self._file = None
            self._chunks = self._whole = 0
            raise BeginAgain
        if self._file is None:
            self._file = self._begun(chunk.vectors.shape[1])
        self._file.add(chunk)

    def _begun(self, dim: int) -> GrowingFile:
        self._part.unlink(missing_ok=True)  # it might be a link to another file
        return GrowingFile(self._part, self._layout(dim))

    def _layout(self, dim: int) -> Layout:
        content = self._content
        return Layout(dim, self._kept, content.numbers, tokens=content.tokens, digests=content.about is not None)
