"""What handlers of signals may do to a worker."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from embedctl_workers.serving.interrupts import SignalledEvent


def interrupted_at(line: int, call: Callable[[], Any], handle: Callable[[], None]) -> Any:
    """What a call returns that a signal interrupts at that line of all that it runs."""
    left = line

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal left
        left -= what == "line"
        if what == "line" and not left:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    before, traced = signal.signal(signal.SIGUSR1, lambda *_: handle()), sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(traced)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(60)  # an event with a lock would be waited for, or set, for ever
def test_a_handler_may_set_an_event_wherever_it_interrupts_its_thread() -> None:
    for line in range(1, 5):
        event = SignalledEvent()
        assert interrupted_at(line, event.wait, event.set)
    for line in range(1, 4):
        event = SignalledEvent()
        interrupted_at(line, event.set, event.set)
        assert event.wait()
