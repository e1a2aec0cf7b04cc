"""`.parquet`: one row per record, in input order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from embedctl.output.numbers import FLOAT32, Numbers
from embedctl.output.parts import BeginAgain, part_of, publish
from embedctl.results import ChunkVectors
from embedctl_config.errors import MissingExtra

try:
    from embedctl.output.columns import KeptColumns
    from embedctl.output.row_groups import RowGroups
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error


class ParquetWriter:
    """Writes the columns of :class:`RowGroups`."""

    needs_total = False

    def __init__(
        self,
        path: Path,
        records: int,
        noted: Mapping[str, int] | None,
        keep: Sequence[str] = (),
        numbers: Numbers = FLOAT32,
    ) -> None:
        self._path = path
        self._numbers = numbers
        self._groups: RowGroups | None = None
        self._kept = KeptColumns(keep)

    def write(self, chunk: ChunkVectors) -> None:
        if not len(chunk.positions):  # the dimensions may not be known yet
            return
        if self._kept.widened_by(chunk.kept or [{}] * len(chunk.positions)) and self._groups is not None:
            self.close()
            self._groups = None
            raise BeginAgain
        if self._groups is None:
            self._groups = self._open(chunk.vectors.shape[1])
        self._groups.add(chunk)

    def checkpoint(self) -> None:
        """None: a parquet file is unusable without its footer, so after a fetch died, the next one begins again."""

    def finish(self) -> list[Path]:
        (self._groups or self._open(0)).close()
        publish(self._path)
        return [self._path]

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()

    def discard(self) -> None:
        part_of(self._path).unlink(missing_ok=True)

    def _open(self, dim: int) -> RowGroups:
        part_of(self._path).unlink(missing_ok=True)  # it might be a link to another file
        return RowGroups(part_of(self._path), dim, self._kept, self._numbers)
