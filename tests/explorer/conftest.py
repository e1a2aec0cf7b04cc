"""A separate Redis for the explorer, which empties it after each world."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer


@pytest.fixture
def folder(own_redis: RedisServer) -> Iterator[Path]:
    """The folder with the socket of an empty Redis. Logging is off: client code would log on thousands of paths."""
    logging.disable()
    yield own_redis.folder
    logging.disable(logging.NOTSET)
