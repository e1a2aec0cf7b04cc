"""One connection to Redis and everything that speaks over it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from embedctl.store import Connection, JobStatus, JobStore, Upkeep, WorkerRegistry
from embedctl_config.settings import Settings

if TYPE_CHECKING:
    from embedctl.store.observed import Observer
    from embedctl.tickets import TicketSender

#: The brokers of this many different settings stay ready, the last ones used; others stay while a job holds them.
_KEPT = 4


@dataclass(frozen=True)
class Broker:
    """What producers, jobs and workers share. Safe to use from several threads, and in the children of its process."""

    settings: Settings
    connection: Connection
    jobs: JobStore
    workers: WorkerRegistry
    upkeep: Upkeep

    @classmethod
    def connect(cls, settings: Settings, observer: Observer | None = None) -> Broker:
        """A broker of the caller's own for the Redis of these settings.

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

    @classmethod
    def shared(cls, settings: Settings) -> Broker:
        """The broker of this process for these settings: all its jobs share a few connections.

        Raises:
            SettingsError: no Redis is configured.
        """
        return _shared.get(settings)

    @property
    def tickets(self) -> TicketSender:
        """Sends tickets; importing Celery waits until somebody does."""
        sender: TicketSender | None = self.__dict__.get("_tickets")
        if sender is None or sender.process != os.getpid():
            from embedctl.tickets import TicketSender
            from embedctl_config.celery_app import make_celery

            # Two threads may each make one at first: the other's is of no harm, and no lock can be held at a fork.
            sender = self.__dict__["_tickets"] = TicketSender(
                make_celery(self.settings), self.connection.about_now_ms, self.connection.explained
            )
        return sender

    def send_issued(self, job: JobStatus) -> None:
        """Send the tickets that a job's window has room for."""
        self.tickets.send(job.queue, job.id, self.jobs.issue(job.id, job.queue), version=job.version)

    def close(self) -> None:
        """Close the connections that are idle. Whatever is asked next opens one, so others may share this broker."""
        self.connection.close()
        sender: TicketSender | None = self.__dict__.get("_tickets")
        if sender is not None and sender.process == os.getpid():
            sender.close()


class _Shared:
    """Brokers by the values of their settings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: WeakValueDictionary[Hashable, Broker] = WeakValueDictionary()
        self._last: OrderedDict[Hashable, Broker] = OrderedDict()

    def get(self, settings: Settings) -> Broker:
        key = _value(settings)
        with self._lock:
            broker = self._live.get(key)
            if broker is None:
                # Of a copy: tables of the caller's settings may be changed later, and would then be another's too.
                broker = self._live[key] = Broker.connect(_copied(settings))
            self._last[key] = broker
            self._last.move_to_end(key)
            if len(self._last) > _KEPT:
                self._last.popitem(last=False)
        return broker

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock. Brokers know by themselves in which process they are."""
        self._lock = threading.Lock()


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.after_fork)


#: What is a value by itself.
_PLAIN = (str, int, float, bool, type(None))


def _value(each: Any) -> Hashable:
    """What two settings have in common that say the same, tables included."""
    if names := getattr(each, "__dataclass_fields__", None):
        return _values(getattr(each, name) for name in names)
    if isinstance(each, Mapping):
        return frozenset(zip(each, _values(each.values()), strict=True))
    return _values(each) if isinstance(each, list | tuple) else each


def _values(many: Iterable[Any]) -> tuple[Hashable, ...]:
    return tuple([each if type(each) in _PLAIN else _value(each) for each in many])


def _copied(each: Any) -> Any:
    if names := getattr(each, "__dataclass_fields__", None):
        return type(each)(**{name: _copied(getattr(each, name)) for name in names})
    if isinstance(each, Mapping):
        return {name: _copied(value) for name, value in each.items()}
    return each
