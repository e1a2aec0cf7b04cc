"""The threads that run batches."""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import pytest

from embedctl_config.errors import NotPermitted
from embedctl_gateway.runner import Runner


class OfAnOlderList:
    """Stands in for batches that the user of Redis may not read."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def take(self, *_: Any) -> None:
        self.asked.release()
        raise NotPermitted("this user has no permissions to access one of the keys")


def test_an_older_access_list_is_told_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    batches = OfAnOlderList()
    runner = Runner(cast("Any", None), cast("Any", None), cast("Any", batches))
    runner.start()
    for _ in range(3):
        assert batches.asked.acquire(timeout=60)
    runner.stop()
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(told) <= 3
    assert "no batch is run: this user has no permissions" in told[0].getMessage()
