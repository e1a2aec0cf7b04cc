"""One empty table of each database."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl.destinations import writing
from embedctl_config.retry import Policy
from tests.support.databases import KINDS, Database, Lance, Postgres, database


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty table's URL; the table does not exist yet."""
    return database(request, request.param, tmp_path)


@pytest.fixture
def in_postgres(request: pytest.FixtureRequest, tmp_path: Path) -> Postgres:
    table = database(request, "pgvector", tmp_path)
    assert isinstance(table, Postgres)
    return table


@pytest.fixture
def in_lance(request: pytest.FixtureRequest, tmp_path: Path) -> Lance:
    table = database(request, "lancedb", tmp_path)
    assert isinstance(table, Lance)
    return table


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "OUTSIDE", Policy(0.0, 0.0))
