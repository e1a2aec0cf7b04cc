"""A PostgreSQL table that is to hold vectors, embedctl's own or one that the user made, and the one of its
multi-vectors: what is checked of them, and how rows go there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Cursor, sql

from embedctl.destinations.interface import Batch, Contract
from embedctl.destinations.numbers import Dtype
from embedctl.destinations.postgresql_copy import encoded
from embedctl_config.errors import OutputError
from embedctl_config.outputs import Output

#: Temporary tables, where the rows of a batch stand first, and the vectors of its multi-vectors.
_BATCH, _CHILD_BATCH = sql.Identifier("embedctl_batch"), sql.Identifier("embedctl_multi")


@dataclass(frozen=True, slots=True)
class Table:
    """A table that batches go to, or that of its multi-vectors. The first ones of its columns, which are ours, are its
    key: two in the latter, or else one. Vectors of `binary` have so many bits."""

    name: sql.Identifier
    columns: Sequence[str]
    key: int = 1
    bits: int = 0

    @property
    def batch(self) -> sql.Identifier:
        return _BATCH if self.key == 1 else _CHILD_BATCH

    def copy(self, cursor: Cursor[Any], rows: Batch, into: sql.Identifier) -> None:
        columns = _names(self.columns)
        with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(into, columns)) as copy:
            for block in encoded(rows, self.columns, self.bits):
                copy.write(block)

    def write(self, cursor: Cursor[Any], rows: Batch) -> int:
        """Put rows in the place of those with their keys; returns how many of them were not the same already."""
        made = sql.SQL("CREATE TEMP TABLE {} ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA")
        cursor.execute(made.format(self.batch, _names(self.columns), self.name))
        self.copy(cursor, rows, self.batch)
        key, others = self.columns[: self.key], self.columns[self.key :]
        if self.key > 1:  # vectors that a text has no more
            surplus = sql.SQL(
                "DELETE FROM {} AS t WHERE id IN (SELECT id FROM {}) "
                "AND NOT EXISTS (SELECT FROM {} AS b WHERE (b.id, b.position) = (t.id, t.position))"
            )
            cursor.execute(surplus.format(self.name, _BATCH, self.batch))
        upsert = sql.SQL(
            "INSERT INTO {table} AS t ({columns}) SELECT {columns} FROM {batch} ORDER BY {key} "
            "ON CONFLICT ({key}) DO UPDATE SET {changes} WHERE ({old}) IS DISTINCT FROM ({new})"
        ).format(
            table=self.name,
            columns=_names(self.columns),
            batch=self.batch,
            key=_names(key),
            changes=sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in others),
            old=_names(others, "t"),
            new=_names(others, "excluded"),
        )
        return cursor.execute(upsert).rowcount

    def lacks_some(self, cursor: Cursor[Any]) -> bool:
        """Whether rows of the batch are not in the table, though nothing was refused."""
        told = _names([name for name in self.columns if name in (*self.columns[: self.key], "source")])
        query = sql.SQL("SELECT {2} FROM {0} EXCEPT SELECT {2} FROM {1} WHERE id IN (SELECT id FROM {0})")
        return cursor.execute(query.format(self.batch, self.name, told)).rowcount > 0


def _names(columns: Sequence[str], *of: str) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(*of, name) for name in columns)


#: The types of dense vectors, and of those of multi-vectors, by the type of their numbers.
KINDS: Mapping[str, LiteralString] = {Dtype.FLOAT32: "vector", Dtype.FLOAT16: "halfvec", Dtype.BINARY: "bit"}


def vector_columns(contract: Contract) -> dict[str, tuple[LiteralString, int]]:
    """The type, and the size as the contract has it, of each column of vectors."""
    kinds: dict[Output, tuple[str, LiteralString]] = {
        Output.DENSE: ("embedding", KINDS[contract.dtype]),
        Output.SPARSE: ("sparse", "sparsevec"),
    }
    sizes = contract.sizes
    return {column: (kind, sizes[output]) for output, (column, kind) in kinds.items() if output in sizes}


def _types(cursor: Cursor[Any], number: int) -> dict[str, str]:
    rows = cursor.execute(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
        (number,),
    ).fetchall()
    return {column: kind.rpartition(".")[2] for column, kind in rows}


def _allowed(kind: str, size: int, found: str) -> tuple[str, ...]:
    """The types that a column of vectors may have: of any length, while that is not known."""
    sized = f"{kind}({size})" if size else found
    return (sized, kind) if sized.startswith(kind) else (kind,)


def check_child(cursor: Cursor[Any], child: sql.Identifier, number: int, name: str, contract: Contract) -> None:
    """OutputError unless a table is that of the multi-vectors of the table with this number."""
    found = cursor.execute(
        "SELECT conrelid FROM pg_constraint JOIN pg_class c ON c.oid = conrelid "
        "WHERE conrelid = to_regclass(%s) AND confrelid = %s::oid AND relpersistence = 'p' "
        "AND pg_get_constraintdef(pg_constraint.oid) LIKE 'FOREIGN KEY (id) REFERENCES %%(id) ON DELETE CASCADE'",
        (child.as_string(cursor), number),
    ).fetchone()
    types = {} if found is None else _types(cursor, found[0])
    kinds = _allowed(KINDS[contract.multi_type.name], contract.multi_dim, types.get("embedding", ""))
    if types.get("position") != "integer" or types.get("embedding") not in kinds:
        raise OutputError(
            f"{name}: its multi-vectors need the table {child.as_string(cursor)} with the columns id, which REFERENCES "
            f"it ON DELETE CASCADE, position of the type integer, and embedding of the type {kinds[0]}: drop both "
            "tables, or choose one that does not exist yet"
        )


def checked_columns(cursor: Cursor[Any], number: int, name: str, contract: Contract) -> tuple[str, tuple[str, ...]]:
    """The type of the column id of the table with this number, and which of our columns it has. OutputError: it lacks
    what is needed."""
    types = _types(cursor, number)
    expected: dict[str, tuple[str, ...]] = {"source": ("bytea",)}
    vectors = vector_columns(contract)
    for column, (kind, size) in vectors.items():
        expected[column] = _allowed(kind, size, types.get(column, ""))
    for column, allowed in expected.items():
        if types.get(column) not in allowed:
            raise OutputError(
                f"{name}: the table needs a column {column} of the type {allowed[0]}, and it has "
                f"{types.get(column, 'none')}: add it with ALTER TABLE, or choose a table that does not exist yet"
            )
    exact = cursor.execute(
        "SELECT bool_and(c.collisdeterministic IS NOT FALSE) FROM pg_index i "
        "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
        "LEFT JOIN pg_collation c ON c.oid IN (a.attcollation, i.indcollation[0]) "
        "WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indnkeyatts = 1 "
        "AND i.indpred IS NULL AND a.attname = 'id'",
        (number,),
    ).fetchone()
    if exact != (True,):
        raise OutputError(
            f"{name}: the column id is not unique by its very characters: make it so with ALTER TABLE … ADD "
            "UNIQUE (id), not deferrable, and with a deterministic collation"
        )
    metadata = ("metadata",) if types.get("metadata") == "jsonb" else ()
    return types.get("id", "none"), ("id", *vectors, "source", *metadata)
