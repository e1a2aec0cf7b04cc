"""What holds for Qdrant alone: collections that are behind aliases, or that others delete."""

from __future__ import annotations

from typing import Any

import pytest

from embedctl.destinations import writing
from embedctl_config.errors import DestinationRefused, OtherContract, OutputError
from tests.support.database_rows import OTHER, deleted, holds_rows, rows_of, written
from tests.support.databases import Database, Qdrant, assert_holds, batch


@pytest.mark.parametrize("table", ["qdrant-http", "qdrant"], indirect=True)
def test_points_stay_the_same_behind_another_alias(table: Database) -> None:
    """Users build a collection under a name, and move the alias that they search to it."""
    from qdrant_client import models

    assert isinstance(table, Qdrant)
    rows = batch(["a", "7", "b"])
    written(table, rows)
    with table.client() as client:
        alias = models.CreateAlias(collection_name=table.collection, alias_name=f"{table.collection}-live")
        client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    with table.delivery(options="-live") as destination:
        assert destination.sources(rows.ids) == dict(rows.rows)
        destination.write(rows)
        assert destination.delete(rows.rows[:1]) == 1
    assert_holds(table, rows.part(slice(1, None)))


@pytest.mark.parametrize("table", ["qdrant-http", "qdrant"], indirect=True)
def test_a_point_that_another_program_made_of_a_record_is_found_and_deleted(table: Database) -> None:
    from qdrant_client import models

    assert isinstance(table, Qdrant)
    rows = batch(["a", "b"])
    written(table, rows)
    payload = {"id": "a", "embedctl_source": (rows.sources or [b""])[0].hex()}
    with table.client() as client:
        client.upsert(table.collection, [models.PointStruct(id=7, vector=rows.vectors[0].tolist(), payload=payload)])
    found = rows_of(table)
    assert found.pop("7") == found["a"]
    assert found == dict(rows.rows)
    assert deleted(table, [("7", found["a"])]) == 1
    assert_holds(table, rows)


@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
@pytest.mark.usefixtures("no_pauses")
def test_a_collection_that_was_deleted_meanwhile_is_the_fault_of_no_record(table: Database) -> None:
    with table.delivery() as destination:
        table.remove()
        with pytest.raises(OutputError, match="was deleted meanwhile") as gone:
            list(writing.write(destination, batch(["a"])))
    assert not isinstance(gone.value, DestinationRefused)


@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_collection_that_another_model_has_made_again_is_noticed(
    table: Database, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whether it is replaced before an upsert, or as the upsert is answered."""

    def replaced() -> None:
        table.remove()
        assert not holds_rows(table, OTHER)

    with table.delivery() as destination:
        destination.write(batch(["a"]))
        client = vars(destination)["_client"]
        upsert = client.upsert

        def answered(*args: Any, **named: Any) -> Any:
            found = upsert(*args, **named)
            replaced()
            return found

        if when == "before":
            replaced()
        else:
            monkeypatch.setattr(client, "upsert", answered)
        with pytest.raises(OtherContract):
            destination.write(batch(["b"]))
    assert table.rows() == {}
