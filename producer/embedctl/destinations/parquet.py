"""`.parquet`: one row per record, in input order."""

from __future__ import annotations

from pathlib import Path

from embedctl.destinations.unfinished import part_of, publish
from embedctl.destinations.writer import Content, Writer
from embedctl.results import ChunkVectors
from embedctl_config.errors import MissingExtra

try:
    from embedctl.destinations.columns import KeptColumns
    from embedctl.destinations.row_groups import RowGroupFile
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error


class ParquetWriter(Writer):
    """Writes the columns of :class:`Layout`."""

    def __init__(self, content: Content) -> None:
        self.paths = [content.path]
        self._file = RowGroupFile(part_of(content.path), content, KeptColumns(content.keep))

    def write(self, chunk: ChunkVectors) -> None:
        self._file.add(chunk)

    def finish(self) -> list[Path]:
        self._file.finish()
        publish(self.paths[0])
        return self.paths

    def close(self) -> None:
        """Write all chunks given, so that the file can be read as it is."""
        self._file.close()
