"""One empty table of each database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sinks import KINDS, Database, database


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty table's URL; the table does not exist yet."""
    return database(request, request.param, tmp_path)
