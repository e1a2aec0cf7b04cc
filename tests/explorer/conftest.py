"""A Redis of its own for the explorer: it empties it after each world."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RedisServer


@pytest.fixture
def folder(own_redis: RedisServer) -> Iterator[Path]:
    """Where the socket of an empty Redis is. What client code logs on thousands of ways is left out."""
    logging.disable()
    yield own_redis.folder
    logging.disable(logging.NOTSET)
