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

from embedctl.machine import machine_id, process_id, runs
from embedctl.store import DrainState, Holder
from embedctl.store.lease import Lease
from embedctl.waiting import Waiter
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError, JobHeld

log = logging.getLogger(__name__)


class DrainRight:
    """The right of this process to drain a job. Every method raises JobHeld if another process has it.

    Attributes:
        token: what stands for it in Redis.

    Args:
        high_water: above so many bytes of results in Redis, no tickets are sent for the job.
    """

    def __init__(self, waiter: Waiter, high_water: int) -> None:
        self._waiter = waiter
        self._me = Holder(secrets.token_hex(8), machine_id(), process_id(os.getpid()), socket.gethostname())
        self._take = partial(waiter.broker.drains.take, waiter.job_id, self._me, high_water=high_water)
        self.token = self._me.token

    def take(self, place: str = "") -> DrainState:
        """Become the job's only drainer, or be it still.

        Args:
            place: where the parts are, if that is known now.
        """
        found = self._ask(place=place)
        if isinstance(found, Holder) and found.machine == self._me.machine != "" and not runs(found.process):
            log.warning("job %s: its drainer, %s, has died; this process goes on", self._waiter.job_id, found)
            found = self._ask(place=place, dead=found.token)
        if isinstance(found, Holder):
            raise JobHeld(
                f"job {self._waiter.job_id} is being drained by {found}: wait for that. If it died, another may drain "
                f"the job {keys.DRAINER_LEASE_S} s later"
            )
        return found

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
