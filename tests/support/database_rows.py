"""Steps of a delivery to a table, one at a time."""

from __future__ import annotations

from dataclasses import replace

from embedctl.destinations.interface import Batch, Contract
from embedctl.destinations.sync import Difference, Limit, compare, delete_missing
from embedctl.records import make_record
from tests.support.databases import CONTRACT, Database

#: Another model's.
OTHER = replace(CONTRACT, fingerprint="bb" * 32)


def written(table: Database, *batches: Batch, contract: Contract = CONTRACT) -> None:
    """Open, write each batch, and close."""
    destination = table.destination()
    destination.open(contract)
    for each in batches:
        destination.write(each)
    destination.close()


def holds_rows(table: Database, contract: Contract = CONTRACT) -> bool:
    destination = table.destination()
    try:
        return destination.open(contract)
    finally:
        destination.close()


def rows_of(table: Database) -> dict[str, bytes | None]:
    destination = table.destination()
    destination.open(CONTRACT)
    found = list(destination.ids())
    destination.close()
    assert len(dict(found)) == len(found)
    return dict(found)


def deleted(table: Database, rows: list[tuple[str, bytes | None]]) -> int:
    destination = table.destination()
    destination.open(CONTRACT)
    try:
        return destination.delete(rows)
    finally:
        destination.close()


def compared(table: Database, texts: dict[str, str]) -> Difference:
    destination = table.destination()
    try:
        return compare(destination, CONTRACT, (make_record(text, label, 1000) for label, text in texts.items()))
    finally:
        destination.close()


def missing_deleted(table: Database, difference: Difference, limit: Limit) -> int:
    destination = table.destination()
    destination.open(CONTRACT)
    try:
        return delete_missing(destination, difference, limit)
    finally:
        destination.close()
