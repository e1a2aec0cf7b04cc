"""`lancedb://`: a table of LanceDB in a folder. One process writes to it at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import numpy as np
import numpy.typing as npt

from embedctl.destinations.interface import Batch, Contract, Destination, Row, Stored, source_of_text
from embedctl.destinations.numbers import Dtype, Numbers
from embedctl.destinations.unfinished import check_folder, locked
from embedctl.destinations.urls import DestinationUrl
from embedctl_config import durable
from embedctl_config.errors import (
    DestinationRefused,
    DestinationUnavailable,
    MissingExtra,
    OtherContract,
    OutputError,
    SettingsError,
)
from embedctl_config.outputs import Output
from embedctl_config.record_ids import MAX_DIGITS, IdType, RecordId
from embedctl_config.settings import Settings

#: How much LanceDB reads ahead as it gathers the pieces of a table (bytes), 2 GiB by default. It looks once.
os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(32 * 1024 * 1024))
try:
    import lancedb
    import pyarrow as pa
    import pyarrow.compute as pc

    from embedctl.destinations.columns import arrow_type, column_of
except ImportError as error:
    raise MissingExtra("lancedb", "lancedb://") from error

#: The contract in the table's metadata.
_CONTRACT = "embedctl"
#: In LanceDB's message if the file system failed, such as a full disk, or another program was in the way, such as one
#: that compacts the table.
_PASSING = re.compile(r"LanceError\(IO\)|commit conflict|concurrent", re.IGNORECASE)
_SOURCE = re.compile(r", /\S+\.rs:\d+(:\d+)?$")
#: Rows that are listed together, and how many such batches are searched together: each search hashes what it looks for.
_LISTED, _SEARCHED = 10_000, 40
#: Changes, each of which makes a small piece of a table, until these are gathered. LanceDB's manual says the same.
_GATHERED = 20


class LanceTable(Destination):
    """A table with the columns id (of the type of the ids), embedding (float32, float16, or the bits of uint8) and
    multi (float32 or float16), each if the contract has these vectors, metadata (kept fields as JSON) and source
    (hexadecimal text).

    The lock is a file beside the table, `.TABLE.lock`.
    """

    #: Each write makes a version of the table, and reads all its ids.
    batch_records = 25_000
    outputs = (Output.DENSE, Output.MULTI)
    dtypes = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BINARY)

    def __init__(self, url: DestinationUrl, settings: Settings) -> None:
        url.only("table")
        self._table_name = url.needed("table")
        if url.address:
            raise SettingsError(f"{url}: LanceDB is in a folder here: write lancedb:///FOLDER, or lancedb:FOLDER")
        self._folder = Path(unquote(url.path))
        if not self._folder.name:
            raise SettingsError(f"{url}: name the database's folder, as lancedb:///FOLDER?table=TABLE")
        self.name = str(url)
        self._stack = ExitStack()
        self._table: Any = None
        #: When each file was changed that is on the disk.
        self._synced: dict[str, int] = {}
        self._changed = self._is_new = False
        #: A version, and the sorted hashes of all ids that it has, 8 bytes each.
        self._version, self._hashes = -1, np.empty(0, np.int64)

    def open(self, contract: Contract | None) -> bool:
        if contract is None:
            folder = self._folder.absolute()
            check_folder(next(each for each in (folder, *folder.parents) if each.exists()), self.name)
            return False
        with self._explained():
            if not contract.is_sized and not (self._folder / f"{self._table_name}.lance").is_dir():
                return False
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stack.close()  # of a try that failed
            self._stack.enter_context(locked(self._folder / self._table_name))
            self._table = self._opened(contract)
            if self._table is None:
                return False
            version = self._table.version  # before it is looked at: another program may add rows at any time
            holds_rows: bool = self._table.count_rows() > 0
            facts = {key.decode(): value.decode() for key, value in (self._table.schema.metadata or {}).items()}
            found = Contract.from_json(facts.get(_CONTRACT, ""))
            if found is None and not holds_rows:  # a table's metadata can't be changed here
                raise OtherContract(
                    f"{self.name} is empty, and was not made by embedctl: remove it, and it is made again"
                )
            contract.refuse_other(found, self.name)
            self.take_ids(IdType.named(found.ids if found else ""), contract)
            if contract.is_sized:
                self._check_columns(contract)
            # Also what a process left that died before it had synced it.
            self._sync()
            self._is_new = not holds_rows
            if self._is_new:  # a table that was not read is added to in less time
                self._version, self._hashes = version, np.empty(0, np.int64)
            return holds_rows

    def sources(self, ids: Sequence[RecordId]) -> Mapping[RecordId, bytes | None]:
        found: dict[RecordId, bytes | None] = {}
        with self._explained():
            self._look()
            if self._has_none(_hashes(ids)):
                return found
            # A query with so many ids takes six times as long as all rows, and a kilobyte of memory for each id.
            wanted = _plain(column_of(ids, arrow_type(self.id_type)))
            listed = self._listed("id", "source")
            while some := list(islice(listed, _SEARCHED)):
                rows = pa.Table.from_batches(some)
                found.update(_rows_of(rows.filter(pc.is_in(_plain(rows["id"].combine_chunks()), wanted))))
        return found

    def ids(self) -> Iterator[Row]:
        with self._explained():
            for batch in self._listed("id", "source"):
                yield from _rows_of(batch)

    def _listed(self, *columns: str) -> Iterator[pa.RecordBatch]:
        query = self._table.search().select(list(columns)).limit(self._table.count_rows())
        yield from query.to_batches(_LISTED)

    def write(self, batch: Batch) -> None:
        with self._explained():
            version, hashes = self._look(), _hashes(batch.ids)
            made = self._add(batch, version) if self._has_none(hashes) else self._merge(batch)
            if made == version + 1:  # no other program has written in between
                self._version, self._hashes = made, np.sort(np.concatenate([self._hashes, hashes]), kind="stable")
            self._sync()

    def delete(self, rows: Sequence[Row]) -> int:
        # The lock keeps other writers away in between.
        found = self.sources([label for label, _ in rows])
        same = [label for label, source in rows if label in found and found[label] == source]
        if same:
            with self._explained():
                made = self._table.delete(_among(same)).version
                if made == self._version + 1:
                    self._version = made  # whose ids are among those that are known
                self._sync()
            self._changed = True
        return len(same)

    def close(self) -> None:
        try:
            if self._changed:
                self._gather()
        finally:
            self._changed, self._table, self._version = False, None, -1
            self._stack.close()

    def _gather(self) -> None:
        """Gather the small pieces of a table once they are many: it writes one of less than a million rows again."""
        with self._explained():
            if self._table.stats()["fragment_stats"]["num_small_fragments"] > _GATHERED:
                self._table.optimize()
                self._sync()

    def _look(self) -> int:
        """See which ids the table has; returns its version."""
        version: int = self._table.version
        if version != self._version:
            there = chain.from_iterable(each["id"].to_pylist() for each in self._listed("id"))
            self._version, self._hashes = version, _hashes(there)
        return version

    def _has_none(self, hashes: npt.NDArray[np.int64]) -> bool:
        """Whether it is certain that the table has no id with one of these hashes."""
        begin, end = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        return bool((begin == end).all())

    def _add(self, batch: Batch, version: int) -> int:
        """Add rows that this version lacks; returns the version that has them. It takes half the time of a merge, and
        leaves nothing to gather in a table that was empty."""
        made: int = self._table.add(self._rows(batch)).version
        self._changed |= not self._is_new
        if made == version + 1:
            return made
        self._table.delete(_among(batch.ids))  # another program has written in between, perhaps the same ids
        return self._merge(batch)

    def _merge(self, batch: Batch) -> int:
        """Add rows, or put them in the place of those with their ids; returns the version that has them."""
        self._changed = True
        merge = self._table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        made: int = merge.execute(self._rows(batch)).version
        return made

    def _opened(self, contract: Contract) -> Any:
        # Another program may have written since: what it added would be doubled.
        database = lancedb.connect(self._folder, read_consistency_interval=timedelta(0))
        try:
            return database.open_table(self._table_name)
        except ValueError as error:
            if "was not found" not in str(error):
                raise
        # There may be a folder of the name: of a process that died while it made the table.
        return database.create_table(self._table_name, schema=_schema(contract)) if contract.is_sized else None

    def _check_columns(self, contract: Contract) -> None:
        schema, expected = self._table.schema, _schema(replace(contract, ids=str(self.id_type)))
        if schema.remove_metadata() != expected.remove_metadata():
            raise OutputError(
                f"{self.name}: the table has the columns {_in_words(schema)}, and needs {_in_words(expected)}: choose "
                "another table, which is made if it does not exist"
            )

    def _rows(self, batch: Batch) -> pa.Table:
        schema = self._table.schema.remove_metadata()
        none = pa.nulls(len(batch), pa.string())
        columns = {
            "id": column_of(batch.ids, arrow_type(self.id_type)),
            "metadata": none if batch.kept is None else pa.array(batch.kept, pa.string()),
            "source": none if batch.sources is None else pa.array(map(bytes.hex, batch.sources), pa.string()),
        }
        if "embedding" in schema.names:
            columns["embedding"] = _lists(batch.vectors)
        if batch.multi is not None:
            offsets = pa.array(batch.multi.starts, pa.int32())
            columns["multi"] = pa.ListArray.from_arrays(offsets, _lists(batch.multi.vectors))
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _sync(self) -> None:
        """Sync the files of the newest version, its manifest and their folders: LanceDB leaves them to the kernel."""
        for folder, _, names in os.walk(self._folder / f"{self._table_name}.lance"):
            fresh = False
            for path in (os.path.join(folder, name) for name in names):  # noqa: PTH118  (a table has many)
                with suppress(FileNotFoundError):  # another program's, which compacts the table
                    fresh |= self._sync_file(path)
            if fresh:
                durable.sync_folder(Path(folder))
        durable.sync_folder(self._folder)

    def _sync_file(self, path: str) -> bool:
        changed = os.stat(path).st_mtime_ns  # noqa: PTH116  (a table has many)
        if self._synced.get(path) == changed:
            return False
        with open(path, "rb") as stream:  # noqa: PTH123  (as above)
            os.fsync(stream.fileno())
        self._synced[path] = changed
        return True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OutputError, MissingExtra):
            raise
        except OSError as error:
            raise DestinationUnavailable(f"{self.name}: {error.strerror or _first_line(error)}") from error
        except (ValueError, RuntimeError, pa.ArrowException) as error:  # what LanceDB raises
            if _PASSING.search(str(error)):
                raise DestinationUnavailable(f"{self.name}: {_first_line(error)}") from error
            raise DestinationRefused(f"{self.name} refuses it: {_first_line(error)}") from error


def _schema(contract: Contract) -> pa.Schema:
    numbers, multi = Numbers(Dtype(contract.dtype)), pa.from_numpy_dtype(contract.multi_type)
    dense = pa.list_(pa.from_numpy_dtype(numbers.dtype), numbers.width(contract.dim))
    types = {
        Output.DENSE: pa.field("embedding", dense),
        Output.MULTI: pa.field("multi", pa.list_(pa.list_(multi, contract.multi_dim))),
    }
    fields = [
        pa.field("id", arrow_type(IdType.named(contract.ids)), nullable=False),
        *(types[output] for output in contract.outputs),
        pa.field("metadata", pa.string()),
        pa.field("source", pa.string()),
    ]
    return pa.schema(fields, {_CONTRACT: contract.text})


def _lists(vectors: Stored) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _plain(ids: pa.Array) -> pa.Array:
    """UUIDs as bytes, which arrow can compare."""
    return ids.storage if isinstance(ids, pa.ExtensionArray) else ids


def _hashes(ids: Iterable[RecordId]) -> npt.NDArray[np.int64]:
    return np.sort(np.fromiter(map(hash, ids), np.int64))


def _rows_of(table: Any) -> Iterator[Row]:
    for label, source in zip(table["id"].to_pylist(), table["source"].to_pylist(), strict=True):
        yield label, None if source is None else source_of_text(source)


def _among(ids: Sequence[RecordId]) -> str:
    return f"id IN ({', '.join(map(_literal, ids))})"


def _literal(label: RecordId) -> str:
    if isinstance(label, int):
        return str(label)
    if isinstance(label, bytes | UUID):
        return f"X'{(label if isinstance(label, bytes) else label.bytes).hex()}'"
    quoted = "'" + str(label).replace("'", "''") + "'"
    if isinstance(label, Decimal):
        return f"CAST({quoted} AS DECIMAL({MAX_DIGITS},{IdType.of(label).scale}))"
    return quoted if isinstance(label, str) else f"DATE {quoted}"


def _first_line(error: Exception) -> str:
    """What went wrong, without the line of LanceDB's source where it did."""
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return _SOURCE.sub("", said)
