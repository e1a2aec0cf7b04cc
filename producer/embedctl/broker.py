"""One connection to Redis and everything that speaks over it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from embedctl.store import Connection, JobStatus, JobStore, Upkeep, WorkerRegistry
from embedctl_config.settings import Settings

if TYPE_CHECKING:
    from embedctl.store.observed import Observer
    from embedctl.tickets import TicketSender


@dataclass(frozen=True)
class Broker:
    """What producers, jobs and workers share. Safe to use from several threads."""

    settings: Settings
    connection: Connection
    jobs: JobStore
    workers: WorkerRegistry
    upkeep: Upkeep

    @classmethod
    def connect(cls, settings: Settings, observer: Observer | None = None) -> Broker:
        """Open a connection to the Redis of these settings.

        Args:
            observer: is told of every round trip of the store's; those of Celery are not among them.

        Raises:
            SettingsError: no Redis is configured.
        """
        connection = Connection(settings, observer)
        return cls(
            settings,
            connection,
            JobStore(connection, settings),
            WorkerRegistry(connection),
            Upkeep(connection, settings),
        )

    @cached_property
    def tickets(self) -> TicketSender:
        """Sends tickets; importing Celery waits until somebody does."""
        from embedctl.tickets import TicketSender
        from embedctl_config.celery_app import make_celery

        return TicketSender(make_celery(self.settings), self.connection.about_now_ms)

    def send_issued(self, job: JobStatus) -> None:
        """Send the tickets that a job's window has room for."""
        self.tickets.send(job.queue, job.id, self.jobs.issue(job.id, job.queue), version=job.version)

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()
        if "tickets" in self.__dict__:
            self.tickets.close()
