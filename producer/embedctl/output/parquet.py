"""`.parquet`: one row per record, in input order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embedctl.destinations.loop import BeginAgain
from embedctl.output.about import ABOUT
from embedctl.output.parts import part_of, publish
from embedctl.output.writer import Content, Writer
from embedctl.results import ChunkVectors
from embedctl_config.errors import MissingExtra

try:
    from embedctl.output.columns import KeptColumns
    from embedctl.output.row_groups import Layout, RowGroupFile
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error


class ParquetWriter(Writer):
    """Writes the columns of :class:`Layout`."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._file: RowGroupFile | None = None
        self._kept = KeptColumns(content.keep)

    @property
    def paths(self) -> Sequence[Path]:
        return [self._content.path]

    def write(self, chunk: ChunkVectors) -> None:
        if not len(chunk.positions):
            return  # the dimensions may not be known yet
        if self._kept.widened_by(chunk.kept or [{}] * len(chunk.positions)) and self._file is not None:
            self.discard()
            self._file = None
            raise BeginAgain
        if self._file is None:
            self._file = self._begun(chunk.vectors.shape[1])
        self._file.add(chunk)

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

    def _begun(self, dim: int) -> RowGroupFile:
        content = self._content
        layout = Layout(dim, self._kept, content.numbers, tokens=content.tokens, digests=content.about is not None)
        return RowGroupFile(part_of(content.path), layout)
