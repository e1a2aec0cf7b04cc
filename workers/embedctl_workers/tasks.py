"""The one Celery task."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task

from embedctl.tickets import Ticket
from embedctl_config.celery_app import TASK
from embedctl_workers.runner import ChunkRunner


def register(app: Celery, runner: ChunkRunner, model_of_queue: dict[str, str]) -> None:
    """Make `runner` answer the tickets that `app` receives.

    Args:
        model_of_queue: the model whose tickets come by each queue.
    """

    @app.task(name=TASK, bind=True, typing=False)
    def encode(self: Task[Any, Any], /, job_id: str, chunk: int, **facts: Any) -> None:
        queue = (self.request.delivery_info or {}).get("routing_key") or ""
        runner.run(model_of_queue[queue], Ticket(queue, job_id, chunk, facts))
