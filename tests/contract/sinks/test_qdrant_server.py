"""The Qdrant sink over HTTP, against a stand-in for the server that fails when it is told to."""

from __future__ import annotations

import pytest

from embedctl.sinks import deliver as deliveries
from embedctl.sinks.base import Batch
from embedctl.sinks.deliver import write_and_commit
from embedctl.sinks.registry import sink_of
from embedctl_config.errors import OutputError, SinkRefused, SinkUnavailable
from embedctl_config.retry import Policy
from embedctl_config.settings import Settings
from tests.support.qdrant_server import QdrantServer
from tests.support.result_chunks import unit_vectors
from tests.support.sinks import PROVENANCE, QdrantByHttp, assert_holds, batch, target


@pytest.fixture
def table(qdrant_http: QdrantServer) -> QdrantByHttp:
    return QdrantByHttp(qdrant_http)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "OUTSIDE", Policy(0.0, 0.0))


@pytest.mark.parametrize("fault", [500, 503, 429, 408, "lost"])
def test_a_server_that_fails_four_times_has_each_record_once(table: QdrantByHttp, fault: int | str) -> None:
    """An answer that is lost leaves it open whether the records are there."""
    sink = table.sink()
    sink.open(target())
    table.server.faults = [fault] * 4
    rows = batch(["a", "b"])
    write_and_commit(sink, rows, 1)
    sink.close()
    assert table.server.requests["PUT collection/points"] == 5
    assert_holds(table, rows)


def test_a_server_that_keeps_failing_ends_the_delivery(table: QdrantByHttp) -> None:
    sink = table.sink()
    sink.open(target())
    table.server.faults = [503] * 99
    with pytest.raises(SinkUnavailable, match=r"503 .*told to fail.* Tried 5 times"):
        write_and_commit(sink, batch(["a"]), 1)
    sink.close()


def test_what_a_server_refuses_is_said_in_its_words(table: QdrantByHttp) -> None:
    sink = table.sink()
    sink.open(target())
    table.server.faults = [422] * 99
    with pytest.raises(SinkRefused, match=r"422 .*told to fail.*Records: 'a'"):
        write_and_commit(sink, batch(["a"]), 1)
    sink.close()


def test_requests_stay_far_below_what_a_server_takes(table: QdrantByHttp) -> None:
    dim, rows = 1024, 600
    sink = table.sink()
    sink.open(target(provenance=type(PROVENANCE)("aa" * 32, "fp32", "dummy", dim)))
    sink.write(Batch([f"r{i}" for i in range(rows)], unit_vectors(rows, dim)))
    sink.close()
    assert 4 * 1024 * 1024 < table.server.largest <= 8 * 1024 * 1024
    assert table.server.requests["PUT collection/points"] > 1
    assert len(table.rows()) == rows


def test_the_api_key_is_sent_and_its_absence_is_explained(table: QdrantByHttp) -> None:
    table.server.key = "s3cret"
    with pytest.raises(SinkUnavailable, match="set QDRANT_API_KEY"):
        table.sink().check()
    sink = sink_of(table.url, Settings(qdrant_api_key="s3cret"))
    sink.check()
    sink.close()


def test_a_server_that_keeps_no_metadata_is_refused(table: QdrantByHttp) -> None:
    table.server.keeps_metadata = False
    sink = table.sink()
    with pytest.raises(OutputError, match=r"Qdrant 1\.16 or newer"):
        sink.open(target())
    sink.close()
