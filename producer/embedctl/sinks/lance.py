"""`lancedb://`: a table of LanceDB in a folder. One process writes to it at a time."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from embedctl.output.parts import locked
from embedctl.sinks.base import NOTE, Batch, Provenance, Sink, Target, Verified, check_provenance, compared
from embedctl.sinks.notes import noted, resume_point
from embedctl.sinks.urls import SinkUrl
from embedctl_config import durable
from embedctl_config.errors import MissingExtra, OutputError, SettingsError, SinkRefused, SinkUnavailable
from embedctl_config.settings import Settings

try:
    import lancedb
    import pyarrow as pa
except ImportError as error:
    raise MissingExtra("lancedb", "lancedb://") from error

#: In the table's metadata: a random word, so that a note of progress never counts for a table that was made again.
_IDENTITY = "embedctl.table"
#: In LanceDB's message if the file system failed, such as a full disk.
_IO_ERROR = "LanceError(IO)"
_SOURCE = re.compile(r", /\S+\.rs:\d+(:\d+)?$")


class LanceSink(Sink):
    """A table with the columns id (text), embedding (float32 or float16) and metadata (kept fields as JSON).

    The note of progress and the lock are files beside the table: `.TABLE.embedctl.json` and `.TABLE.lock`.
    """

    #: Each commit makes a version of the table, and reads all its ids.
    rows_per_commit = 25_000

    def __init__(self, url: SinkUrl, settings: Settings) -> None:
        url.only("table")
        self._table_name = url.needed("table")
        if url.address:
            raise SettingsError(f"{url}: LanceDB is in a folder here: write lancedb:///FOLDER, or lancedb:FOLDER")
        self._folder = Path(unquote(url.path))
        if not self._folder.name:
            raise SettingsError(f"{url}: name the database's folder, as lancedb:///FOLDER?table=TABLE")
        self.name = str(url)
        self._stack = ExitStack()
        self._note_file = self._folder / f".{self._table_name}.embedctl.json"
        self._table: Any = None
        self._identity = ""

    def check(self) -> None:
        there = next(each for each in (self._folder.absolute(), *self._folder.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise OutputError(f"{self.name} can't be written: {there} is no folder, or permission is denied")

    def open(self, target: Target) -> int:
        self._target = target
        with self._explained():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(locked(self._folder / self._table_name))
            self._table = self._opened(target)
            return self._begun(target)

    def write(self, batch: Batch) -> None:
        with self._explained():
            (
                self._table.merge_insert("id")
                .when_matched_update_all()
                .when_not_matched_insert_all()
                .execute(self._rows(batch))
            )

    def commit(self, chunks: int) -> None:
        target = self._needs()
        with self._explained():
            self._save(noted(self._notes(), target.job, target.variant, chunks))

    def verify(self, sample: Batch) -> Verified:
        with self._explained():
            found = (
                self._table.search()
                .where(_among(sample.ids))
                .select(["id", "embedding"])
                .limit(2 * len(sample))
                .to_arrow()
            )
        vectors = dict(zip(found["id"].to_pylist(), found["embedding"].to_pylist(), strict=True))
        return compared(sample, vectors, half=self._needs().half)

    def delete(self, ids: Sequence[str]) -> int:
        with self._explained():
            found: int = self._table.count_rows(_among(ids))
            if found:
                self._table.delete(_among(ids))
        return found

    def finish(self) -> None:
        # Once, at the end: it gathers the files of all commits into fewer ones.
        with self._explained():
            self._table.optimize()

    def close(self) -> None:
        self._table = None
        self._stack.close()

    def _opened(self, target: Target) -> Any:
        database = lancedb.connect(self._folder)
        try:
            return database.open_table(self._table_name)
        except ValueError as error:
            if "was not found" not in str(error):
                raise
        # There may be a folder of the name: of a process that died while it made the table.
        return database.create_table(self._table_name, schema=self._schema(target))

    def _schema(self, target: Target) -> pa.Schema:
        kind = pa.float16() if target.half else pa.float32()
        fields = [
            pa.field("id", pa.string(), nullable=False),
            pa.field("embedding", pa.list_(kind, target.provenance.dim)),
            pa.field("metadata", pa.string()),
        ]
        return pa.schema(fields, {NOTE: target.provenance.to_json(), _IDENTITY: secrets.token_hex(16)})

    def _begun(self, target: Target) -> int:
        schema = self._table.schema
        facts = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        self._identity = facts.get(_IDENTITY, "")
        self._check_columns(schema, target)
        found = Provenance.from_json(facts.get(NOTE, ""))
        empty = self._table.count_rows() == 0
        if check_provenance(found, target, self.name, empty=empty) and not target.allow_mixed:
            # A table's metadata can't be changed here.
            raise OutputError(
                f"{self.name} is empty, and was made for other vectors, or not by embedctl: remove it, and it is made "
                "again"
            )
        return resume_point(self._notes(), target.job, target.variant)

    def _check_columns(self, schema: pa.Schema, target: Target) -> None:
        expected = {field.name: field.type for field in self._schema(target)}
        for name, kind in expected.items():
            at = schema.get_field_index(name)
            if at < 0 or schema.field(at).type != kind:
                has = "there is none" if at < 0 else f"it is {schema.field(at).type}"
                raise OutputError(
                    f"{self.name}: the table needs a column {name} of the type {kind}, and {has}. Choose another "
                    "table, which is made if it does not exist"
                )
        if others := [name for name in schema.names if name not in expected]:
            raise OutputError(
                f"{self.name}: the table has other columns ({', '.join(others)}), which records from a job would "
                "leave empty: choose another table"
            )

    def _rows(self, batch: Batch) -> pa.Table:
        schema = self._table.schema
        kind = schema.field("embedding").type
        kept: Sequence[str | None] = batch.kept or [None] * len(batch)
        flat = pa.array(batch.vectors.ravel().astype(kind.value_type.to_pandas_dtype(), copy=False))
        return pa.table(
            [
                pa.array(batch.ids, pa.string()),
                pa.FixedSizeListArray.from_arrays(flat, kind.list_size),
                pa.array(kept, pa.string()),
            ],
            schema=schema.remove_metadata(),
        )

    def _notes(self) -> Mapping[str, Any]:
        try:
            note = json.loads(self._note_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # none yet, or not ours: a delivery begins again
            return {}
        if not isinstance(note, dict) or note.get("table") != self._identity or not isinstance(note.get("jobs"), dict):
            return {}
        jobs: Mapping[str, Any] = note["jobs"]
        return jobs

    def _save(self, jobs: Mapping[str, Any]) -> None:
        fresh = self._note_file.with_suffix(".new")
        fresh.unlink(missing_ok=True)  # it might be a link to another file
        fresh.write_text(json.dumps({"table": self._identity, "jobs": jobs}), encoding="utf-8")
        durable.publish(fresh, self._note_file)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OutputError, MissingExtra):
            raise
        except OSError as error:
            raise SinkUnavailable(f"{self.name}: {error.strerror or _first_line(error)}") from error
        except (ValueError, RuntimeError, pa.ArrowException) as error:  # what LanceDB raises
            if _IO_ERROR in str(error):
                raise SinkUnavailable(f"{self.name}: {_first_line(error)}") from error
            raise SinkRefused(f"{self.name} refuses it: {_first_line(error)}") from error


def _among(ids: Sequence[str]) -> str:
    words = ", ".join("'" + label.replace("'", "''") + "'" for label in ids)
    return f"id IN ({words})"


def _first_line(error: Exception) -> str:
    """What went wrong, without the line of LanceDB's source where it did."""
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return _SOURCE.sub("", said)
