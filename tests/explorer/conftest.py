"""A separate Redis for the explorer, which empties it after each world."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.machine import EXPLORED
from tests.support.redis_server import RedisServer


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report how far all explorations went together, across all processes."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    told = [value for each in reports for name, value in each.user_properties if name == EXPLORED]
    if told:
        _, steps, states, depths, paths, seconds = zip(*told, strict=True)
        terminalreporter.write_line(
            f"explored: {sum(steps):,} interleavings of one step more, {sum(paths):,} paths, {sum(states):,} distinct "
            f"states, at most {max(depths)} steps deep, in {len(told)} worlds and {sum(seconds):.0f} s"
        )


@pytest.fixture
def folder(own_redis: RedisServer) -> Iterator[Path]:
    """The folder with the socket of an empty Redis. Logging is off: client code would log on thousands of paths."""
    logging.disable()
    yield own_redis.folder
    logging.disable(logging.NOTSET)
