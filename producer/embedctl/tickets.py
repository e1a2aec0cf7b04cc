"""Tickets: the Celery messages that say "look at chunk i of job J"."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from celery import Celery
from kombu.exceptions import KombuError, OperationalError

from embedctl_config import wire
from embedctl_config.celery_app import TASK
from embedctl_config.errors import BrokerUnavailable

#: Most tickets published in one round trip.
_BATCH = 500


class TicketSender:
    """Publishes tickets in batches. A ticket that is lost or doubled is harmless: the store knows better."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def send(self, queue: str, job_id: str, chunks: Sequence[int]) -> None:
        """Publish one ticket a chunk.

        Raises:
            BrokerUnavailable: Redis can't be reached, and some may not have been sent; the reaper sends them later.
        """
        if not chunks:
            return
        try:
            with self._app.producer_pool.acquire(block=True) as producer, producer.batch(_BATCH):  # type: ignore[attr-defined]  # new in kombu 5.7, not yet in its stubs
                for chunk in chunks:
                    self._app.send_task(
                        TASK,
                        args=(job_id, chunk),
                        kwargs={"version": wire.VERSION},
                        queue=queue,
                        producer=producer,
                        # What an operator reads in Flower; the suffix keeps a ticket that is sent again apart.
                        task_id=f"{job_id}.{chunk}.{secrets.token_hex(3)}",
                    )
        except (KombuError, OperationalError, OSError) as error:
            raise BrokerUnavailable(f"tickets can't be sent: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._app.close()
