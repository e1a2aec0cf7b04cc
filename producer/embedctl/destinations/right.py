"""The right to drain a job, which one process at a time has."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from embedctl.common.machine import machine_id, process_id, runs
from embedctl.destinations.held import Held
from embedctl.store import BatchFacts, DrainState, Holder, PartFacts
from embedctl.store.lease import Lease
from embedctl.waiting.waiter import Waiter
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError, JobHeld

log = logging.getLogger(__name__)


class DrainRight:
    """The right of this process to drain a job. While Redis holds more than `high_water` bytes of its results, workers
    get only the chunk that the drainer waits for. `token` stands for the right there. Every method raises JobHeld if
    another process has it."""

    def __init__(self, waiter: Waiter, high_water: int) -> None:
        self._waiter = waiter
        self._me = _this_process()
        self._take = partial(waiter.broker.drains.take, waiter.job_id, self._me, high_water=high_water)
        self.token = self._me.token

    def take(self, place: str = "") -> DrainState:
        """Become the job's only drainer, or stay it; `place` is where the parts are, if that is known now."""
        found = self._ask(place=place)
        if isinstance(found, Holder) and _has_died(found):
            log.warning("job %s: its drainer, %s, has died; this process goes on", self._waiter.job_id, found)
            found = self._ask(place=place, dead=found.token)
        if isinstance(found, Holder):
            raise JobHeld(
                f"job {self._waiter.job_id} is being drained by {found}: wait for that. If it died, another may drain "
                f"the job {keys.DRAINER_LEASE_S} s later"
            )
        return found

    def release(self, name: str, facts: PartFacts | BatchFacts, held: Held) -> None:
        """Note under a name that these results are durable elsewhere, and only then free them in Redis."""
        drains, (first, last) = self._waiter.broker.drains, held.range
        note = partial(
            drains.note,
            self._waiter.job_id,
            self.token,
            name,
            facts,
            result_bytes=held.bytes,
            digests=bytes(held.digests),
            more=held.more if last >= first else [*held],
        )
        answer = self._waiter.ask(note)
        if answer == "not_owner":  # this process stood still, or Redis lost the lease
            self.take()
            answer = self._waiter.ask(note)
        if answer != "ok":
            raise overtaken(self._waiter.job_id)
        self._waiter.ask(partial(drains.unlink, self._waiter.job_id, [*held]))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it meanwhile, and give it up at the end: writing a part may take long."""
        try:
            with Lease(lambda: isinstance(self._take(), DrainState), keys.DRAINER_LEASE_S / 3):
                yield
        finally:
            with suppress(EmbedctlError):  # otherwise the lease runs out, only later
                self._take(lease_s=0)

    def _ask(self, **options: Any) -> DrainState | Holder:
        return self._waiter.ask(partial(self._take, **options))


def overtaken(job_id: str) -> JobHeld:
    """The error of a drainer whose work another one has done."""
    return JobHeld(
        f"job {job_id} was drained by another process, while this one stood still; the same command resumes there"
    )


def _this_process() -> Holder:
    return Holder(secrets.token_hex(8), machine_id(), process_id(os.getpid()), socket.gethostname())


def _has_died(holder: Holder) -> bool:
    """Whether it is known that a process does not run any more: those of other machines may."""
    return holder.machine == machine_id() != "" and not runs(holder.process)
