"""Checks of a PostgreSQL table that is to hold vectors: embedctl's own, or one that the user made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

from embedctl.destinations.interface import Contract
from embedctl_config.errors import OutputError
from embedctl_config.outputs import Output

if TYPE_CHECKING:
    import psycopg


def vector_columns(contract: Contract) -> dict[str, tuple[LiteralString, int]]:
    """pgvector's type, and the size as the contract has it, of each column of vectors."""
    dense: LiteralString = "halfvec" if contract.dtype == "float16" else "vector"
    kinds = {Output.DENSE: ("embedding", dense), Output.SPARSE: ("sparse", "sparsevec")}
    return {kinds[output][0]: (kinds[output][1], size) for output, size in contract.sizes.items()}


def checked_columns(
    cursor: psycopg.Cursor[Any], number: int, name: str, contract: Contract
) -> tuple[str, tuple[str, ...]]:
    """The type of the column id of the table with this number, and which of our columns it has. OutputError: it lacks
    what is needed."""
    rows = cursor.execute(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
        (number,),
    ).fetchall()
    types: dict[str, str] = {column: kind.rpartition(".")[2] for column, kind in rows}
    expected: dict[str, tuple[str, ...]] = {"source": ("bytea",)}
    vectors = vector_columns(contract)
    for column, (kind, size) in vectors.items():
        # Of any length, while that is not known.
        sized = f"{kind}({size})" if size else types.get(column, "")
        expected[column] = (sized, kind) if sized.startswith(kind) else (kind,)
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
