"""`postgresql://`: a table of PostgreSQL with pgvector. Records and the resume point are one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlencode

from embedctl.sinks.base import NOTE, Batch, Provenance, Sink, Target, Verified, check_provenance, compared
from embedctl.sinks.urls import SinkUrl
from embedctl_config.errors import MissingExtra, OutputError, SettingsError, SinkRefused, SinkUnavailable
from embedctl_config.settings import Settings

try:
    import psycopg
    from pgvector import HalfVector, Vector
    from pgvector.psycopg import register_vector
    from psycopg import sql
except ImportError as error:
    raise MissingExtra("pgvector", "postgresql://") from error

#: How long a connection may take unless the URL says otherwise (seconds).
_CONNECT_S = 10
#: Resume points of all tables, in the first schema of the search path. A table is known by its number, which a table
#: that was dropped and made again does not share.
_PROGRESS = sql.Identifier("embedctl_progress")
_BATCH = sql.Identifier("embedctl_batch")
#: Locks that last to the end of the transaction: of making tables, and, with a table's number, of writing to it.
_MAKING, _WRITING = 0x656D6264, 0x656D6265
#: In front of our line in a table's comment.
_MARK = f"{NOTE}: "
#: Classes of errors that psycopg counts among those of the server's operation, and that another try does not mend: a
#: limit of the program, such as an id that is too long for an index.
_LASTING = ("54",)
#: The columns that are ours.
_ID, _EMBEDDING, _METADATA = "id", "embedding", "metadata"


class PostgresSink(Sink):
    """A table with the columns id (text, unique), embedding (vector or halfvec) and metadata (jsonb: kept fields).

    Columns that are not ours stay as they are.
    """

    def __init__(self, url: SinkUrl, settings: Settings) -> None:
        table = url.needed("table").split(".")
        if len(table) > 2 or not all(table):
            raise SettingsError(f"{url}: table is a name, or schema.name")
        self._table = sql.Identifier(*table)
        self._quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table)
        self.name = str(url)
        query = {name: value for name, value in url.query.items() if name != "table"}
        query.setdefault("connect_timeout", str(_CONNECT_S))
        query.setdefault("application_name", "embedctl")
        self._conninfo = str(url).partition("?")[0] + f"?{urlencode(query)}"
        self._connection: psycopg.Connection[Any] | None = None
        self._number = 0
        self._columns: tuple[str, ...] = ()

    def check(self) -> None:
        with _explained(self.name):
            self._connected()

    def open(self, target: Target) -> int:
        self._target = target
        with _explained(self.name):
            connection = self._connected()
            with connection.transaction():
                self._make()
                return self._resume_point()

    def write(self, batch: Batch) -> None:
        with _explained(self.name):
            cursor = self._connected().cursor()
            self._lock(cursor)
            cursor.execute(
                sql.SQL("CREATE TEMP TABLE {} (id text, embedding {}, metadata text) ON COMMIT DROP").format(
                    _BATCH, self._type()
                )
            )
            with cursor.copy(
                sql.SQL("COPY {} (id, embedding, metadata) FROM STDIN (FORMAT BINARY)").format(_BATCH)
            ) as copy:
                copy.set_types(["text", "halfvec" if self._needs().half else "vector", "text"])
                kept: Sequence[str | None] = batch.kept or [None] * len(batch)
                for label, vector, fields in zip(batch.ids, self._vectors(batch), kept, strict=True):
                    copy.write_row((label, vector, fields))
            cursor.execute(self._upsert())
            cursor.execute(sql.SQL("DROP TABLE {}").format(_BATCH))

    def commit(self, chunks: int) -> None:
        with _explained(self.name):
            connection, target = self._connected(), self._needs()
            cursor = connection.cursor()
            self._lock(cursor)
            # Another process that delivers the same may be ahead.
            cursor.execute(
                sql.SQL(
                    "INSERT INTO {progress} AS t (relation, job, variant, chunks) VALUES (%s, %s, %s, %s) "
                    "ON CONFLICT (relation, job) DO UPDATE SET variant = excluded.variant, updated_at = now(), "
                    "chunks = CASE WHEN t.variant = excluded.variant THEN greatest(t.chunks, excluded.chunks) "
                    "ELSE excluded.chunks END"
                ).format(progress=_PROGRESS),
                (self._number, target.job, target.variant, chunks),
            )
            connection.commit()

    def recover(self) -> None:
        with suppress(psycopg.Error):
            if self._connection is not None:
                self._connection.rollback()
                return
        self.close()

    def verify(self, sample: Batch) -> Verified:
        with _explained(self.name):
            connection = self._connected()
            with connection.transaction():
                rows = connection.execute(
                    sql.SQL("SELECT id, embedding::real[] FROM {} WHERE id = ANY(%s)").format(self._table),
                    (list(sample.ids),),
                ).fetchall()
        return compared(sample, dict(rows), half=self._needs().half)

    def delete(self, ids: Sequence[str]) -> int:
        # Text can't hold a NUL here, so no row has such an id.
        held = [label for label in ids if "\0" not in label]
        with _explained(self.name):
            connection = self._connected()
            with connection.transaction():
                cursor = connection.cursor()
                self._lock(cursor)
                cursor.execute(sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(self._table), (held,))
                return cursor.rowcount

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            # No prepared statements, so that a pooler may hand each transaction to another server process.
            self._connection = psycopg.connect(self._conninfo, prepare_threshold=None)
            if self._number:
                self._learn_types(self._connection)
        return self._connection

    @staticmethod
    def _learn_types(connection: psycopg.Connection[Any]) -> None:
        register_vector(connection)
        connection.rollback()

    def _type(self) -> sql.Composed:
        target = self._needs()
        name = "halfvec" if target.half else "vector"
        return sql.SQL("{}({})").format(sql.SQL(name), sql.Literal(target.provenance.dim))

    def _vectors(self, batch: Batch) -> Iterator[Vector | HalfVector]:
        if self._needs().half:
            return map(HalfVector, batch.vectors.astype(">f2"))
        # All at once into the order of bytes that goes over the wire, which otherwise each vector is brought into.
        return map(Vector, batch.vectors.astype(">f4"))

    def _lock(self, cursor: psycopg.Cursor[Any]) -> None:
        """Keep other deliveries to this table waiting until the transaction ends: two would lock rows crosswise."""
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", (_WRITING, _signed(self._number)))

    def _upsert(self) -> sql.Composed:
        columns = sql.SQL(", ").join(map(sql.Identifier, self._columns))
        others = self._columns[1:]
        values = [sql.SQL("metadata::jsonb") if name == _METADATA else sql.Identifier(name) for name in self._columns]
        return sql.SQL(
            "INSERT INTO {table} AS t ({columns}) SELECT DISTINCT ON (id) {values} FROM {batch} ORDER BY id "
            "ON CONFLICT (id) DO UPDATE SET {changes} WHERE ({old}) IS DISTINCT FROM ({new})"
        ).format(
            table=self._table,
            columns=columns,
            values=sql.SQL(", ").join(values),
            batch=_BATCH,
            changes=sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in others),
            old=sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(name)) for name in others),
            new=sql.SQL(", ").join(sql.SQL("excluded.{}").format(sql.Identifier(name)) for name in others),
        )

    def _make(self) -> None:
        """Make what is missing, and check what is there. It all becomes visible at once."""
        connection, target = self._connected(), self._needs()
        cursor = connection.cursor()
        cursor.execute("SELECT pg_advisory_xact_lock(%s, 0)", (_MAKING,))
        self._make_extension(cursor)
        register_vector(connection)
        if self._find() is None:
            cursor.execute(
                sql.SQL("CREATE TABLE {} (id text PRIMARY KEY, embedding {} NOT NULL, metadata jsonb)").format(
                    self._table, self._type()
                )
            )
        number = self._find()
        assert number is not None, "the table was made in this transaction"
        self._number = number
        self._check_columns(cursor)
        comment = self._comment(cursor)
        is_there = cursor.execute(sql.SQL("SELECT EXISTS (SELECT FROM {})").format(self._table)).fetchone()
        found = _provenance_in(comment)
        if check_provenance(found, target, self.name, empty=is_there == (False,)):
            told = [line for line in comment.splitlines() if not line.startswith(_MARK)]
            text = "\n".join([*told, _MARK + target.provenance.to_json()])
            cursor.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(self._table, sql.Literal(text)))

    def _make_extension(self, cursor: psycopg.Cursor[Any]) -> None:
        if cursor.execute("SELECT FROM pg_extension WHERE extname = 'vector'").rowcount:
            return
        try:
            cursor.execute("CREATE EXTENSION vector")
        except psycopg.Error as error:
            raise OutputError(
                f"{self.name}: the database has no extension pgvector, and this user can't make it "
                f"({_reason(error)}): let an administrator run CREATE EXTENSION vector"
            ) from error

    def _find(self) -> int | None:
        row = self._connected().execute("SELECT to_regclass(%s)::oid", (self._quoted,)).fetchone()
        number: int | None = None if row is None else row[0]
        return number

    def _check_columns(self, cursor: psycopg.Cursor[Any]) -> None:
        """Refuse a table that was made by someone else, if it lacks what is needed."""
        rows = cursor.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
            (self._number,),
        ).fetchall()
        types: dict[str, str] = {name: kind.rpartition(".")[2] for name, kind in rows}
        kind = "halfvec" if self._needs().half else "vector"
        dim = self._needs().provenance.dim
        expected = {_ID: ("text",), _EMBEDDING: (f"{kind}({dim})", kind)}
        if self._needs().keeps:
            expected[_METADATA] = ("jsonb",)
        for name, allowed in expected.items():
            if types.get(name) not in allowed:
                has = f"it is {types[name]}" if name in types else "there is none"
                raise OutputError(
                    f"{self.name}: the table needs a column {name} of the type {allowed[0]}, and {has}. Choose "
                    "another table, which is made if it does not exist, or change this one with ALTER TABLE"
                )
        self._columns = (_ID, _EMBEDDING, _METADATA) if types.get(_METADATA) == "jsonb" else (_ID, _EMBEDDING)
        unique = cursor.execute(
            "SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            "WHERE i.indrelid = %s AND i.indisunique AND i.indnkeyatts = 1 AND i.indpred IS NULL AND a.attname = %s",
            (self._number, _ID),
        ).rowcount
        if not unique:
            raise OutputError(
                f"{self.name}: the column id is not unique: make it so with ALTER TABLE … ADD UNIQUE (id)"
            )

    def _comment(self, cursor: psycopg.Cursor[Any]) -> str:
        row = cursor.execute("SELECT obj_description(%s, 'pg_class')", (self._number,)).fetchone()
        return row[0] if row is not None and row[0] is not None else ""

    def _resume_point(self) -> int:
        connection, target = self._connected(), self._needs()
        # IF NOT EXISTS would ask for the right to make tables even if there is one.
        if connection.execute("SELECT to_regclass('embedctl_progress')").fetchone() == (None,):
            connection.execute(
                sql.SQL(
                    "CREATE TABLE {} (relation oid, job text, variant text NOT NULL, chunks bigint NOT NULL, "
                    "updated_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (relation, job))"
                ).format(_PROGRESS)
            )
        row = connection.execute(
            sql.SQL("SELECT chunks FROM {} WHERE relation = %s AND job = %s AND variant = %s").format(_PROGRESS),
            (self._number, target.job, target.variant),
        ).fetchone()
        return 0 if row is None else int(row[0])


def _provenance_in(comment: str) -> Provenance | None:
    for line in comment.splitlines():
        if line.startswith(_MARK):
            return Provenance.from_json(line.removeprefix(_MARK))
    return None


def _signed(number: int) -> int:
    """A table's number, which has 32 bits, as PostgreSQL's integer."""
    return number - 2**32 if number >= 2**31 else number


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        passes = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        if passes and (error.sqlstate or "")[:2] not in _LASTING:
            raise SinkUnavailable(f"{name}: {_reason(error)}") from error
        raise SinkRefused(f"{name} refuses it: {_reason(error)}") from error


def _reason(error: psycopg.Error) -> str:
    """What PostgreSQL says, on one line; its DETAIL would repeat a record's content."""
    said = error.diag.message_primary or str(error)
    return " ".join(said.split()) or type(error).__name__
