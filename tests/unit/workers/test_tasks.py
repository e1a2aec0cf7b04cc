"""The Celery task that handles tickets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, cast

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from embedctl_config.celery_app import TASK
from embedctl_workers.serving.runner import ChunkRunner
from embedctl_workers.serving.tasks import register


def test_a_thread_opens_no_file_to_end_its_first_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery(set_as_current=False)
    register(app, cast("ChunkRunner", None), {})
    app.finalize()

    def no_files(*_: Any) -> NoReturn:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(app, "_get_backend", no_files)

    def handle() -> object:
        task = app.tasks[TASK]
        return build_tracer(TASK, task, app=app)("an id", [], {}, {"id": "an id", "delivery_info": {}})

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handle).result().info is None  # type: ignore[attr-defined]
