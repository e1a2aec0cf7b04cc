"""One connection to Redis and everything that uses it."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from embedctl.chunk_files import ChunkFiles
from embedctl.queueing.listening import AskingListener, Listener
from embedctl.store import Connection, Drains, JobStore, Upkeep, WorkerRegistry
from embedctl.store.outside import PlaceNotes
from embedctl.store.quotas import Quotas, kept_most
from embedctl.store.repair import Repair
from embedctl_config.settings import Settings

if TYPE_CHECKING:
    from embedctl.remote.calls import Asks
    from embedctl.remote.jobs import RemoteJobs
    from embedctl.store.connection import Observer

#: This many brokers stay connected, the most recently used ones, each for different settings. Others stay connected
#: while a job holds them.
_KEPT = 4
#: The bounds for a job's waiting text, and for a drained job's results, in a Redis without a maxmemory (bytes).
HIGH_WATER_BYTES, RESULTS_HIGH_WATER_BYTES = 256 * 1024 * 1024, 1024 * 1024 * 1024


@dataclass(frozen=True)
class Broker:
    """The store of one Redis. Threads may share it, and so may the children of its process."""

    settings: Settings
    connection: Connection
    jobs: JobStore
    workers: WorkerRegistry
    upkeep: Upkeep
    chunk_files: ChunkFiles = field(default_factory=ChunkFiles)
    #: When the reapers of this process are to begin their next round.
    rounds: dict[str, float] = field(default_factory=dict, compare=False)
    #: The same as `jobs` if a gateway takes Redis' place; None if none does.
    remote: RemoteJobs | None = None

    @classmethod
    def connect(cls, settings: Settings, observer: Observer | None = None) -> Broker:
        """A broker for the Redis of these settings that belongs to the caller alone; raises SettingsError if none is
        configured. `observer` is called after each round trip of the store, but not after those of Celery."""
        connection = Connection(settings, observer)
        files = ChunkFiles(settings.chunk_files, settings.limits.chunk_inline_bytes, PlaceNotes(connection))
        return cls(
            settings,
            connection,
            JobStore(connection, settings, files),
            WorkerRegistry(connection),
            Upkeep(connection, settings, files),
            files,
        )

    @classmethod
    def through_gateway(cls, settings: Settings, calls: Asks | None = None) -> Broker:
        """A broker for the jobs in the gateway of `url`, or for those that the calls answer for. What needs Redis
        itself raises SettingsError."""
        from embedctl.remote import jobs as remote  # here, because few processes need it
        from embedctl.remote.calls import Calls

        connection = remote.RemoteConnection(settings, calls or Calls(settings))
        jobs = remote.RemoteJobs(connection, settings)
        return cls(
            settings,
            connection,
            jobs,
            remote.RemoteWorkers(connection, jobs),
            remote.RemoteUpkeep(connection, settings, jobs),
            rounds={"next": math.inf},  # the reaper runs beside Redis
            remote=jobs,
        )

    @classmethod
    def shared(cls, settings: Settings) -> Broker:
        """The broker of this process for these settings, by Redis or through a gateway. All jobs of the process share
        its few connections. Raises SettingsError if neither is configured."""
        return _shared.instead or _shared.get(settings)

    @classmethod
    @contextmanager
    def answered_by(cls, calls: Asks, settings: Settings) -> Iterator[None]:
        """Within the block, the calls answer for the broker of all settings."""
        before, _shared.instead = _shared.instead, cls.through_gateway(settings, calls)
        try:
            yield
        finally:
            _shared.instead = before

    @cached_property
    def quotas(self) -> Quotas:
        return Quotas(self.connection) if self.remote is None else self.remote.quotas

    @cached_property
    def repair(self) -> Repair:
        return Repair(self.connection, self.upkeep, self.quotas)

    @cached_property
    def drains(self) -> Drains:
        return Drains(self.connection, self.jobs) if self.remote is None else self.remote.drains

    def high_water(self) -> int:
        """Most bytes of a job's text that wait for workers; above it, its producer pauses."""
        if self.remote is not None:
            return self.remote.room
        return self.settings.limits.high_water_bytes or self.connection.maxmemory() // 16 or HIGH_WATER_BYTES

    def results_high_water(self) -> int:
        """Most bytes of a drained job's results in Redis; above it, its chunks wait."""
        if self.remote is not None:
            return self.settings.limits.results_high_water_bytes or self.remote.room
        own = self.settings.limits.results_high_water_bytes
        return own or self.connection.maxmemory() // 4 or RESULTS_HIGH_WATER_BYTES

    def kept_most(self) -> int:
        """Most bytes that a tenant keeps through gateways, in jobs and files."""
        return kept_most(self.connection, self.chunk_files)

    @property
    def listener(self) -> Listener:
        listener: Listener | None = self.__dict__.get("_listener")
        if listener is None or listener.process != os.getpid():
            listener = Listener(self.connection) if self.remote is None else AskingListener(self.remote)
            self.__dict__["_listener"] = listener
        return listener

    def close(self) -> None:
        """Close the idle connections. The next call opens a new one, so others may still use this broker."""
        self.connection.close()


class _Shared:
    """Brokers by the values of their settings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Takes the place of all others; see :meth:`Broker.answered_by`.
        self.instead: Broker | None = None
        self._live: WeakValueDictionary[str, Broker] = WeakValueDictionary()
        self._last: OrderedDict[str, Broker] = OrderedDict()

    def get(self, settings: Settings) -> Broker:
        # Of the values, because the text of settings leaves out secrets.
        key = repr([getattr(settings, name) for name in settings.__dataclass_fields__])
        with self._lock:
            broker = self._live.get(key)
            if broker is None:
                # From a copy, because the caller may change tables of its settings later, and others share the broker.
                made = Broker.through_gateway if settings.url else Broker.connect
                broker = self._live[key] = made(deepcopy(settings))
            self._last[key] = broker
            self._last.move_to_end(key)
            if len(self._last) > _KEPT:
                self._last.popitem(last=False)
        return broker

    def after_fork(self) -> None:
        """Replace the lock, which another thread of the parent may have held. Brokers notice a fork themselves."""
        self._lock = threading.Lock()


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.after_fork)
