"""A few threads that do not keep a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any


class DaemonThreads(Executor):
    """Like a ThreadPoolExecutor of at most `most` threads, but a process does not wait for them at its end: it abandons
    their work."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._begun = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in one of the threads; see :meth:`concurrent.futures.Executor.submit`."""
        done: Future[Any] = Future()
        self._work.put((done, partial(fn, *args, **kwargs)))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._begun < self._most:
                    self._begun += 1
                    threading.Thread(target=self._run, name=f"{self._name}-{self._begun}", daemon=True).start()
        return done

    def _run(self) -> None:
        while True:
            done, work = self._work.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:  # noqa: BLE001  (the caller gets it)
                    done.set_exception(error)
            del done, work  # otherwise they would keep their objects alive until the next work comes
            self._idle.release()
