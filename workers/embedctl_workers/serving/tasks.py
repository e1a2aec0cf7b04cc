"""The one Celery task."""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, Task

from embedctl.queueing.tickets import Ticket
from embedctl_config.celery_app import TASK
from embedctl_workers.serving.messages import names_a_chunk
from embedctl_workers.serving.runner import ChunkRunner

log = logging.getLogger(__name__)


def register(app: Celery, runner: ChunkRunner, model_of_queue: dict[str, str]) -> None:
    """Have `runner` handle the tickets that `app` receives; each queue holds those of a model."""

    # By default, Celery makes a backend in each thread, which reads files. Without file descriptors, that fails after
    # the ticket was handled, and again as Celery handles that failure.
    @app.task(name=TASK, bind=True, typing=False, backend=app.backend)
    def encode(self: Task[Any, Any], /, *args: Any, **facts: Any) -> None:
        queue = (self.request.delivery_info or {}).get("routing_key")
        # A message may hold anything: nothing of it is used or logged before it is known to be a ticket.
        if not isinstance(queue, str) or queue not in model_of_queue or not names_a_chunk(*args):
            log.warning("a ticket that names no chunk was dropped")
            return
        job_id, chunk = args
        runner.run(model_of_queue[queue], Ticket(queue, job_id, chunk, facts))
