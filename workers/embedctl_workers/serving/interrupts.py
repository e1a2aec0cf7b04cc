"""What SIGTERM and Ctrl-C do to a worker.

Celery's own answers run inside the signal handler: they send an event, and on a second Ctrl-C stop the pool. If an
earlier signal has the main thread do one of these at that moment, the handler waits forever for a lock that the same
thread holds. The end of a parent with several threads alone sends several SIGTERMs at once. So the handlers here only
set what other code looks at.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from threading import Event

from celery.platforms import EX_OK
from celery.worker import state


class SignalledEvent(Event):
    """An event that handlers of signals may set.

    Other events take a lock to be set, and to be waited for. A handler that interrupts the thread that holds it, which
    may run another handler, would wait for it forever: the end of a parent alone can send several signals at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._was_set = False
        self._reader, self._writer = os.pipe()

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def is_set(self) -> bool:
        return self._was_set

    def set(self) -> None:
        if not self._was_set:
            self._was_set = True
            os.write(self._writer, b"!")  # nobody reads it, so that everybody is woken

    def wait(self, timeout: float | None = None) -> bool:
        if not self._was_set:
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            poll.poll(None if timeout is None else timeout * 1000)
        return self._was_set


def answer_signals(draining: Event, hurrying: Event) -> None:
    """Have SIGTERM and Ctrl-C stop this worker. Call it in the main thread, once Celery has set its own handlers.

    SIGTERM and the first Ctrl-C set `draining`: the worker finishes the chunk that it is encoding. The second Ctrl-C
    sets `hurrying`: it gives that chunk back after the batch that it is encoding.
    """

    interrupts = 0

    def stop(message: str, stream: int = 2) -> None:
        draining.set()
        if state.should_stop is None:  # else it is the status of a worker that falls sick
            state.should_stop = EX_OK  # type: ignore[assignment]  # None until it is set
        with suppress(OSError):  # whoever read it may be gone
            os.write(stream, message.encode())  # not by way of a stream that the interrupted code may be writing to

    def terminated(*_: object) -> None:
        # Not where the log goes, which may be read by programs.
        stop("" if draining.is_set() else "worker: stops after the chunk that it is encoding\n", stream=1)

    def interrupted(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1  # a SIGTERM before counts as none: whoever started the worker may send it beside the terminal
        if interrupts > 1:
            hurrying.set()
            stop("worker: gives back the chunk that it is encoding, and stops\n")
        else:
            stop("worker: stops after the chunk that it is encoding; a second Ctrl-C gives that back\n")

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, interrupted)
