"""What holds for Qdrant alone: collections behind aliases, which others move and delete."""

from __future__ import annotations

import pytest

from embedctl.destinations import writing
from embedctl_config.errors import DestinationRefused, OtherContract, OutputError
from tests.support.database_rows import written
from tests.support.databases import Database, Qdrant, assert_holds, batch


@pytest.mark.parametrize("table", ["qdrant-http", "qdrant"], indirect=True)
def test_points_stay_the_same_behind_another_alias(table: Database) -> None:
    """Users build a collection under a name, and move the alias that they search to it."""
    from qdrant_client import models

    assert isinstance(table, Qdrant)
    rows = batch(["a", "7", "b"])
    written(table, rows)
    with table.client() as client:
        (made,) = (each.collection_name for each in client.get_aliases().aliases if each.alias_name == table.collection)
        alias = models.CreateAlias(collection_name=made, alias_name=f"{table.collection}-live")
        client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    with table.delivery(options="-live") as destination:
        assert destination.sources(rows.ids) == dict(rows.rows)
        destination.write(rows)
        assert destination.delete(rows.rows[:1]) == 1
    assert_holds(table, rows.part(slice(1, None)))


@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
@pytest.mark.usefixtures("no_pauses")
def test_a_collection_that_was_deleted_meanwhile_is_the_fault_of_no_record(table: Database) -> None:
    with table.delivery() as destination:
        table.remove()
        with pytest.raises(OutputError, match="was deleted meanwhile") as gone:
            list(writing.write(destination, batch(["a"])))
    assert not isinstance(gone.value, DestinationRefused)


@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
def test_an_alias_that_was_moved_is_noticed(table: Database) -> None:
    """Of two creators, the last one has the alias; the first one must not go on as if it were found there."""
    from qdrant_client import models

    assert isinstance(table, Qdrant)
    vectors = models.VectorParams(size=2, distance=models.Distance.DOT)
    alias = models.CreateAlias(collection_name="elsewhere", alias_name=table.collection)
    with table.delivery() as destination:
        destination.write(batch(["a"]))
        with table.client() as client:
            client.create_collection("elsewhere", vectors_config=vectors)
            client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
        with pytest.raises(OtherContract):
            destination.write(batch(["b"]))
    table.remove()
