"""The pool of threads that chunks are handled in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from celery.concurrency.thread import TaskPool

from embedctl_workers.backends.base import WarmsThreads
from embedctl_workers.redaction import first_line

log = logging.getLogger(__name__)


def warmed_threads(backends: Collection[object]) -> type[TaskPool]:
    """Celery's threads pool, whose threads do their one-time work for these backends before the first chunk comes."""
    warmed = [each for each in backends if isinstance(each, WarmsThreads)]

    class Threads(TaskPool):
        executor: ThreadPoolExecutor

        def on_start(self) -> None:
            super().on_start()
            if warmed:
                _in_each_thread(self.executor, self.limit, warmed)

        def terminate_job(self, pid: int, signal: int | None = None) -> None:
            """Do nothing: a thread can't be ended, and the chunk's lease lapses. A second Ctrl-C asks for this."""

    return Threads


def _in_each_thread(executor: ThreadPoolExecutor, threads: int, backends: Collection[WarmsThreads]) -> None:
    all_are_here, turn = threading.Barrier(threads), threading.Lock()

    def warm_up() -> None:
        all_are_here.wait()  # so that no thread comes twice
        with turn:
            for backend in backends:
                backend.warm_up_thread()

    for begun in [executor.submit(warm_up) for _ in range(threads)]:
        try:
            begun.result()
        except Exception as error:  # noqa: BLE001  (chunks may still be encoded, or tell what is wrong)
            log.warning("a thread is not warmed up: %s", first_line(error))
