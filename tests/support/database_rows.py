"""Steps of a delivery to a table, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from embedctl.corpus.records import make_record
from embedctl.destinations import writing
from embedctl.destinations.interface import Batch, Contract, Row
from embedctl.sync.comparison import Difference, Limit, compare, delete_missing
from embedctl_config.record_ids import RecordId
from tests.support.databases import CONTRACT, Database

#: Another model's.
OTHER = replace(CONTRACT, fingerprint="bb" * 32)


def written(table: Database, *batches: Batch, contract: Contract = CONTRACT) -> None:
    """Open, write each batch, and close."""
    with table.delivery(contract) as destination:
        for each in batches:
            destination.write(each)


def refused(table: Database, batch: Batch, *, options: str = "") -> dict[RecordId | None, str]:
    """Deliver a batch; returns the ids that the database refuses, and why."""
    with table.delivery(options=options) as destination:
        return {each.id: each.reason for each in writing.write(destination, batch)}


def holds_rows(table: Database, contract: Contract = CONTRACT) -> bool:
    with closing(table.destination()) as destination:
        return destination.open(contract)


def rows_of(table: Database) -> dict[RecordId, bytes | None]:
    with table.delivery() as destination:
        found = list(destination.ids())
    assert len(dict(found)) == len(found)
    return dict(found)


def deleted(table: Database, rows: Sequence[Row]) -> int:
    with table.delivery() as destination:
        return destination.delete(rows)


def compared(table: Database, texts: dict[str, str]) -> Difference:
    with closing(table.destination()) as destination:
        return compare(destination, CONTRACT, (make_record(text, label, 1000) for label, text in texts.items()))


def missing_deleted(table: Database, difference: Difference, limit: Limit) -> int:
    with table.delivery() as destination:
        return delete_missing(destination, difference, limit)
