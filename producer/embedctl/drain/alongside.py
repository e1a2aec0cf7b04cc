"""Draining a job while its records are submitted: otherwise both would wait for each other."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from embedctl.broker import Broker
from embedctl.drain.places import Place
from embedctl.output.numbers import Numbers
from embedctl.waiting import Waiter

#: How long a submission that failed waits for the thread (seconds). What it has not made durable stays in Redis.
_END_S = 10.0


class Alongside:
    """Drains a job in a thread for as long as the block lasts, from :meth:`begin` on.

    Args:
        place: None to drain nothing.
        numbers: as for :func:`drain`.
    """

    def __init__(self, broker: Broker, place: Place | None, numbers: Numbers | None = None) -> None:
        self._broker, self._place, self._numbers = broker, place, numbers
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            # After a submission that went well, the same process drains on: it must not meet its own thread.
            self._thread.join(None if error is None else _END_S)

    def begin(self, job_id: str) -> None:
        """Begin to drain this job."""
        if self._place is not None and self._thread is None:
            self._thread = threading.Thread(target=self._drain, args=(job_id, self._place), name="drain", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the drain, if there is one."""
        if self._error is not None:
            raise self._error

    def _drain(self, job_id: str, place: Place) -> None:
        from embedctl.drain.drainer import Interrupted, drain

        try:
            drain(Waiter(job_id, self._broker), place, stopped=self._over.is_set, numbers=self._numbers)
        except Interrupted:
            pass
        except BaseException as error:  # noqa: BLE001  (the submitting thread raises it)
            self._error = error
