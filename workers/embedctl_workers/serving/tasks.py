"""The one Celery task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery, Task

from embedctl_config import keys
from embedctl_workers.serving.runner import ChunkRunner

log = logging.getLogger(__name__)


def register(
    app: Celery, runner: ChunkRunner, model_of_queue: Mapping[str, str], send_event: Callable[..., object]
) -> None:
    """Have `runner` take chunks for the bells that `app` hears; each queue holds chunks for a model. `send_event` sends
    an event of a task."""

    # By default, Celery makes a backend in each thread, which reads files. Without file descriptors, that fails after
    # the bell was answered, and again as Celery handles that failure.
    @app.task(name=keys.TASK, bind=True, typing=False, backend=app.backend)
    def encode(self: Task[Any, Any], /, *args: Any, **facts: Any) -> str:
        queue = (self.request.delivery_info or {}).get("routing_key")
        # A message may hold anything: nothing of it is used or logged.
        if not isinstance(queue, str) or queue not in model_of_queue:
            log.warning("a message that is no bell was dropped")
            return "no bell"

        def tell(words: str) -> None:
            """Flower shows to operators which chunk it is, and of what."""
            hardware, model = keys.of_queue(queue)
            about = {"args": words, "kwargs": f"class {hardware}, model {model}"}
            send_event("task-started", uuid=self.request.id, name=keys.TASK, **about)

        return runner.run(model_of_queue[queue], queue, tell)
