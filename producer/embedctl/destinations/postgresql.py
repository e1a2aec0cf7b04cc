"""`postgresql://`: a table of PostgreSQL with pgvector. A batch is one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, LiteralString
from urllib.parse import quote, urlencode

from embedctl.destinations.interface import Batch, Contract, Destination, Row
from embedctl.destinations.numbers import Dtype
from embedctl.destinations.postgresql_copy import child_rows
from embedctl.destinations.urls import DestinationUrl
from embedctl_config.errors import DestinationRefused, MissingExtra, OutputError, SettingsError
from embedctl_config.outputs import Output
from embedctl_config.record_ids import IdType, RecordId, of_sql
from embedctl_config.settings import Settings

try:
    import psycopg
    from psycopg import sql

    from embedctl.destinations.postgresql_errors import explained, reason
    from embedctl.destinations.postgresql_table import KINDS, Table, check_child, checked_columns, vector_columns
except ImportError as error:
    raise MissingExtra("pgvector", "postgresql://") from error

#: How long a connection may take unless the URL says otherwise (seconds).
_CONNECT_S = 10
#: The contracts of a schema's tables, in that schema: whatever a role's search path is, a table is bound once.
_CONTRACTS = "embedctl_contracts"
#: What follows the name of a table in that of the table of its multi-vectors; the longest name (bytes).
_CHILD, _LONGEST = "_multi", 63
#: Locks that last to the end of the transaction: of making tables, and, plus a table's number, of writing to it.
_MAKING, _WRITING = 0x656D6264 << 32, 0x656D6265 << 32
#: Rows that are fetched together.
_FETCHED = 20_000


class PostgresTable(Destination):
    """A table with the columns id (unique; text, bigint, uuid, numeric, bytea or date), embedding (vector, halfvec or
    bit) and sparse (sparsevec), each if the contract has these vectors, source (bytea) and metadata (jsonb: kept
    fields). Columns that are not ours stay as they are.

    Multi-vectors stand in a table beside it, `TABLE_multi`, a row for each vector: id, which refers to the record's row
    and is deleted with it, position (in the text, from 0) and embedding.
    """

    outputs = tuple(Output)
    dtypes = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BINARY)

    def __init__(self, url: DestinationUrl, settings: Settings) -> None:
        table = url.needed("table").split(".")
        if len(table) > 2 or not all(table):
            raise SettingsError(f"{url}: table is a name, or schema.name")
        self._table = sql.Identifier(*table)
        self._quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table)
        self.name = str(url)
        # Not the database's encoding: what that lacks is then refused by the server, record by record.
        query = {
            "connect_timeout": str(_CONNECT_S),
            "application_name": "embedctl",
            "client_encoding": "UTF8",
            **url.query,
        }
        del query["table"]
        self._conninfo = str(url).partition("?")[0] + f"?{urlencode(query, quote_via=quote)}"
        self._connection: psycopg.Connection[Any] | None = None
        self._contract = Contract("", "", "", {}, 0)
        self._contracts, self._number = sql.Identifier(_CONTRACTS), 0
        self._child, self._tables = sql.Identifier(_CHILD), list[Table]()
        #: Whether the table held no rows, so that rows may just be added: one that is there is noticed.
        self._is_fresh = False

    def open(self, contract: Contract | None) -> bool:
        with self._transaction() as cursor:
            if contract is None:
                return False
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
            self._contract = contract
            return self._opened(cursor)

    def sources(self, ids: Sequence[RecordId]) -> Mapping[RecordId, bytes | None]:
        with self._transaction() as cursor:
            query = sql.SQL("SELECT id, {} FROM {} t WHERE id = ANY(%s::{}[])")
            there = _beside_values(self._source), _beside_values(self._table)
            found = cursor.execute(query.format(*there, self._id_type), (list(ids),))
            return dict(found.fetchall())

    def ids(self) -> Iterator[Row]:
        # In a connection of its own, so that rows may be deleted meanwhile.
        with (
            explained(self.name),
            psycopg.connect(self._conninfo, prepare_threshold=None) as connection,
            connection.cursor("embedctl_rows", binary=True) as cursor,
        ):
            cursor.itersize = _FETCHED
            query = sql.SQL("SELECT id, {} FROM {} t WHERE id IS NOT NULL")
            yield from cursor.execute(query.format(self._source, self._table))

    def write(self, batch: Batch) -> None:
        if batch.kept is not None and "metadata" not in self._tables[0].columns:
            raise OutputError(f"{self.name}: kept fields need a column metadata of the type jsonb, or omit --keep")
        with self._transaction() as cursor:
            has_triggers = self._lock(cursor)
            if self._is_fresh and not has_triggers and self._added(cursor, batch):
                return
            for table, rows in self._rows(batch):
                fewer = table.write(cursor, rows) < len(rows)  # than that were the same already?
                if has_triggers:
                    cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # some triggers would wait for the commit
                if (fewer or has_triggers) and table.lacks_some(cursor):
                    raise DestinationRefused(f"{self.name} refuses it: a trigger leaves it out")

    def delete(self, rows: Sequence[Row]) -> int:
        with self._transaction() as cursor:
            self._lock(cursor)
            cursor.execute(
                sql.SQL(
                    "DELETE FROM {} AS t USING unnest(%s::{}[], %s::bytea[]) AS gone (id, source) "
                    "WHERE t.id = gone.id AND {} IS NOT DISTINCT FROM gone.source"
                ).format(_beside_values(self._table), self._id_type, _beside_values(self._source)),
                ([label for label, _ in rows], [source for _, source in rows]),
            )
            return cursor.rowcount

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Cursor[Any]]:
        """One that is durable when the block ends."""
        with explained(self.name):
            connection = self._connected()
            with connection.transaction(), connection.cursor() as cursor:
                # A role's default may be not to wait for the disk, or to wait for more than that.
                cursor.execute(
                    "SELECT set_config('synchronous_commit', 'on', true) "
                    "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
                )
                yield cursor

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            # No prepared statements, so that a pooler may hand each transaction to another server process.
            self._connection = psycopg.connect(self._conninfo, prepare_threshold=None)
            # Whatever a role's default is: what another process did before it gave back a lock has to be seen.
            self._connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return self._connection

    @property
    def _source(self) -> sql.Composable:
        """Of a row t of the table, what is told as its source: none if its multi-vectors are gone."""
        if Output.MULTI not in self._contract.outputs:
            return sql.SQL("t.source")
        query = sql.SQL("CASE WHEN EXISTS (SELECT FROM {} c WHERE c.id = t.id) THEN t.source END")
        return query.format(self._child)

    @property
    def _id_type(self) -> sql.SQL:
        return sql.SQL(self.id_type.sql)

    def _rows(self, batch: Batch) -> Iterator[tuple[Table, Batch]]:
        return zip(self._tables, (batch, child_rows(batch)), strict=False)

    def _added(self, cursor: psycopg.Cursor[Any], batch: Batch) -> bool:
        """Copy a batch into the table itself, which takes half the time; whether that was possible."""
        try:
            with cursor.connection.transaction():
                for table, rows in self._rows(batch):
                    table.copy(cursor, rows, table.name)
        except psycopg.Error as error:
            if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                raise
            self._is_fresh = False  # a row is there already, or is refused: the other way tells
        return self._is_fresh

    def _lock(self, cursor: psycopg.Cursor[Any]) -> bool:
        """Keep other deliveries to this table waiting until the transaction ends: two would lock rows crosswise.
        Returns whether rows that are written may come out as others, or not at all. OutputError: the table was dropped,
        or made again, since it was opened."""
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_WRITING + self._number,))
        query = sql.SQL(
            "SELECT relhasrules OR relkind = 'p' OR EXISTS (SELECT FROM pg_trigger WHERE NOT tgisinternal AND "
            'tgrelid IN (c.oid, to_regclass(%s))) FROM {} JOIN pg_class c ON c.oid = "table" '
            'WHERE "table" = to_regclass(%s) AND "table" = %s::oid AND digest = %s'
        )
        facts = self._child.as_string(cursor), self._quoted, self._number, self._contract.digest
        found = cursor.execute(query.format(_beside_values(self._contracts)), facts).fetchone()
        if found is None:
            raise OutputError(f"{self.name}: the table was dropped or replaced meanwhile: run the command again")
        return bool(found[0])

    def _opened(self, cursor: psycopg.Cursor[Any]) -> bool:
        """Make what is missing, and check what is there. It all becomes visible at once."""
        if not self._find(cursor):
            if not self._contract.is_sized:
                return False
            self._make_extension(cursor)
            self.id_type = IdType.named(self._contract.ids)
            vectors = [_column(name, *kind) for name, kind in vector_columns(self._contract).items()]
            made = sql.SQL("CREATE TABLE {} (id {}, {}metadata jsonb, source bytea, PRIMARY KEY (id) INCLUDE (source))")
            cursor.execute(made.format(self._table, self._id_type, sql.Composed(vectors)))
            self._find(cursor)
        holds_rows = cursor.execute(sql.SQL("SELECT FROM {} LIMIT 1").format(self._table)).rowcount > 0
        self._is_fresh = not holds_rows
        found = self._found_contract(cursor)
        if found is not None or holds_rows:
            self._contract.refuse_other(found, self.name)
        elif self._contract.is_sized:
            query = sql.SQL('INSERT INTO {} ("table", contract, digest) VALUES (%s::oid, %s::jsonb, %s)')
            facts = self._number, self._contract.text, self._contract.digest
            cursor.execute(query.format(_beside_values(self._contracts)), facts)
        column, columns = checked_columns(cursor, self._number, self.name, self._contract)
        self._check_ids(column)
        self._tables = [Table(self._table, columns, bits=self._contract.dim)]
        if Output.MULTI in self._contract.outputs:
            self._open_child(cursor, is_made=not holds_rows and self._contract.is_sized)
        return holds_rows

    def _open_child(self, cursor: psycopg.Cursor[Any], *, is_made: bool) -> None:
        """Open the table of multi-vectors, which is made if it is missing and may be."""
        name = self._child.as_string(cursor)
        if is_made and cursor.execute("SELECT to_regclass(%s)", (name,)).fetchone() == (None,):
            made = sql.SQL(
                "CREATE TABLE {} (id {} REFERENCES {} (id) ON DELETE CASCADE, position integer, "
                "{}PRIMARY KEY (id, position))"
            )
            vector = _column("embedding", KINDS[self._contract.multi_type.name], self._contract.multi_dim)
            cursor.execute(made.format(self._child, self._id_type, self._table, vector))
        check_child(cursor, self._child, self._number, self.name, self._contract)
        self._tables.append(Table(self._child, ("id", "position", "embedding"), key=2))

    def _make_extension(self, cursor: psycopg.Cursor[Any]) -> None:
        try:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except psycopg.Error as error:
            raise OutputError(
                f"{self.name}: the database has no extension pgvector, and this user can't make it "
                f"({reason(error)}): let an administrator run CREATE EXTENSION vector"
            ) from error

    def _find(self, cursor: psycopg.Cursor[Any]) -> bool:
        row = cursor.execute(
            "SELECT c.oid, nspname, relname, relpersistence = 'p' AND relkind IN ('r', 'p') FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = to_regclass(%s)",
            (self._quoted,),
        ).fetchone()
        if row is None:
            return False
        self._number, self._contracts = row[0], sql.Identifier(row[1], _CONTRACTS)
        self._child = sql.Identifier(row[1], child := row[2] + _CHILD)
        if Output.MULTI in self._contract.outputs and len(child.encode()) > _LONGEST:
            raise OutputError(f"{self.name}: PostgreSQL has no name as long as {child}: choose a shorter one")
        if not row[3]:
            raise OutputError(
                f"{self.name}: PostgreSQL keeps no rows there for good: it is a view, or an unlogged table, which a "
                "crash empties. Choose a table (ALTER TABLE … SET LOGGED makes it one)"
            )
        return True

    def _found_contract(self, cursor: psycopg.Cursor[Any]) -> Contract | None:
        # IF NOT EXISTS would ask for the right to make tables even if there is one.
        name = self._contracts.as_string(cursor)
        if cursor.execute("SELECT to_regclass(%s)", (name,)).fetchone() == (None,):
            cursor.execute(
                sql.SQL(
                    'CREATE TABLE {} ("table" regclass PRIMARY KEY, contract jsonb NOT NULL, digest bytea NOT NULL)'
                ).format(self._contracts)
            )
        query = sql.SQL('SELECT contract::text FROM {} WHERE "table" = %s::oid')
        row = cursor.execute(query.format(_beside_values(self._contracts)), (self._number,)).fetchone()
        return None if row is None else Contract.from_json(row[0])

    def _check_ids(self, column: str) -> None:
        wanted = IdType.named(self._contract.ids)
        found = of_sql(column, wanted)
        if found is None:
            raise OutputError(
                f"{self.name}: the table needs a column id of the type {wanted.sql}, and it has {column}: "
                f"choose a table that does not exist yet"
            )
        self.take_ids(found, self._contract)


def _column(name: str, kind: LiteralString, size: int) -> sql.Composed:
    """A column of vectors, as a table is made with it, and what parts it from the next one."""
    return sql.SQL("{} {}({}) NOT NULL, ").format(sql.Identifier(name), sql.SQL(kind), sql.Literal(size))


def _beside_values(name: sql.Composable) -> sql.SQL:
    """A name, or a part with names, in a query that takes values, where a % begins one of these."""
    return sql.SQL(name.as_string().replace("%", "%%"))
