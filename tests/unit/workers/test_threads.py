"""The pool of threads that chunks are handled in, each warmed up before the first comes, and the task that they run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, cast

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from embedctl_config.keys import TASK
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.serving.runner import ChunkRunner
from embedctl_workers.serving.tasks import register
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
def test_each_thread_is_warmed_up_once_before_a_chunk(*, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_thread_opens_no_file_to_end_its_first_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery(set_as_current=False)
    register(app, cast("ChunkRunner", None), {}, print)
    app.finalize()

    def no_files(*_: Any) -> NoReturn:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(app, "_get_backend", no_files)

    def handle() -> object:
        task = app.tasks[TASK]
        return build_tracer(TASK, task, app=app)("an id", [], {}, {"id": "an id", "delivery_info": {}})

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handle).result().info is None  # type: ignore[attr-defined]
