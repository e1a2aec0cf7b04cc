"""Qdrant over HTTP, against a stand-in for the server that fails when it is told to."""

from __future__ import annotations

import dataclasses

import pytest

from embedctl.destinations import writing
from embedctl.destinations.interface import Batch
from embedctl.destinations.registry import destination_of
from embedctl_config.errors import DestinationUnavailable
from embedctl_config.settings import Settings
from tests.support.databases import CONTRACT, QdrantByHttp, assert_holds, batch
from tests.support.qdrant_server import QdrantServer
from tests.support.result_chunks import unit_vectors

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def table(qdrant_http: QdrantServer) -> QdrantByHttp:
    return QdrantByHttp(qdrant_http)


@pytest.mark.parametrize("fault", [500, 503, 429, 408, "lost"])
def test_a_server_that_fails_four_times_has_each_record_once(table: QdrantByHttp, fault: int | str) -> None:
    """An answer that is lost leaves it open whether the records are there."""
    rows = batch(["a", "b"])
    with table.delivery() as destination:
        table.server.faults = [fault] * 4
        assert not list(writing.write(destination, rows))
    assert table.server.requests["PUT collection/points"] == 5
    assert_holds(table, rows)


def test_a_server_that_keeps_failing_ends_the_delivery(table: QdrantByHttp) -> None:
    with table.delivery() as destination:
        table.server.faults = [503] * 99
        with pytest.raises(DestinationUnavailable, match=r"503 .*told to fail.* Tried 5 times"):
            list(writing.write(destination, batch(["a"])))


def test_what_a_server_refuses_is_said_in_its_words(table: QdrantByHttp) -> None:
    rows = batch(["a", "b"])
    with table.delivery() as destination:
        table.server.faults = [422] * 2  # the batch, and its first half
        (refused,) = writing.write(destination, rows)
    assert refused.id == "a"
    assert "422 " in refused.reason
    assert "told to fail" in refused.reason
    assert_holds(table, rows.part(slice(1, None)))


def test_requests_stay_far_below_what_a_server_takes(table: QdrantByHttp) -> None:
    """A batch of about :attr:`Destination.batch_bytes` is one request."""
    dim = 1024
    with table.delivery(dataclasses.replace(CONTRACT, dim=dim)) as destination:
        rows = destination.batch_bytes // (4 * dim)
        destination.write(Batch([f"r{i}" for i in range(rows)], unit_vectors(rows, dim)))
    assert 4 * 1024 * 1024 < table.server.largest <= 9 * 1024 * 1024
    assert len(table.rows()) == rows


def test_the_api_key_is_sent_and_its_absence_is_explained(table: QdrantByHttp) -> None:
    table.server.key = "s3cret"
    with pytest.raises(DestinationUnavailable, match="set QDRANT_API_KEY"):
        table.destination().open(None)
    destination = destination_of(table.url, Settings(qdrant_api_key="s3cret"))
    destination.open(None)
    destination.close()
