"""The pool of threads that chunks are handled in: each is warmed up before the first chunk comes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.serving.threads import warmed_threads


class Warmed(DummyBackend):
    """Notes the threads that it was warmed up in, and that they came one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []
        self._turn = threading.Lock()
        self.fails = False

    def warm_up_thread(self) -> None:
        assert self._turn.acquire(blocking=False)
        self.threads.append(threading.get_ident())
        self._turn.release()
        if self.fails:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("fails", [False, True])
def test_each_thread_of_the_pool_is_warmed_up_once_before_the_first_chunk(
    *, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Warmed()
    backend.fails = fails
    pool: Any = warmed_threads([backend, DummyBackend()])(4)
    pool.start()
    executor: ThreadPoolExecutor = pool.executor
    assert sorted(backend.threads) == sorted(each.ident or 0 for each in executor._threads)
    assert len(set(backend.threads)) == 4
    assert caplog.text.count("a thread is not warmed up") == (4 if fails else 0)
    assert executor.submit(int, "1").result() == 1
    pool.stop()
