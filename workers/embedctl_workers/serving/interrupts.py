"""What Ctrl-C does to a worker.

Celery's own answer to a second Ctrl-C runs inside the signal handler: it sends an event and stops the pool. If the
first Ctrl-C has the main thread do one of these at that moment, the handler waits forever for a lock that the same
thread holds. So the handler here only sets what other code looks at.
"""

from __future__ import annotations

import os
import signal
from threading import Event

from celery.platforms import EX_OK
from celery.worker import state


def answer_interrupts(draining: Event, hurrying: Event) -> None:
    """Have Ctrl-C stop this worker. Call it in the main thread, once Celery has set its own handlers.

    The first sets `draining`: the worker finishes the chunk that it is encoding. The second sets `hurrying`: it gives
    that chunk back after the batch that it is encoding.
    """

    interrupts = 0

    def interrupted(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1  # a SIGTERM before counts as none: whoever started the worker may send it beside the terminal
        draining.set()
        if interrupts > 1:
            hurrying.set()
            message = "worker: gives back the chunk that it is encoding, and stops\n"
        else:
            message = "worker: stops after the chunk that it is encoding; a second Ctrl-C gives that back\n"
        if state.should_stop is None:  # else it is the status of a worker that falls sick
            state.should_stop = EX_OK  # type: ignore[assignment]  # None until it is set
        os.write(2, message.encode())  # not by way of a stream that the interrupted code may be writing to

    signal.signal(signal.SIGINT, interrupted)
