"""Receives the events of workers and tickets for the dashboard."""

from __future__ import annotations

import logging

from celery.events import EventReceiver

from embedctl_config.errors import MissingExtra
from embedctl_config.retry import ASIDE, Streak

try:
    from flower.events import Events
except ImportError as error:
    raise MissingExtra("flower", "the dashboard") from error

log = logging.getLogger(__name__)


class RetryingEvents(Events):  # type: ignore[misc]  # Flower ships no types
    """Flower's receiver of events, with a short pause between attempts.

    Flower doubles the pause after each attempt, and so still waits long after the end of a long outage.
    """

    def run(self) -> None:
        failed = Streak()

        def receive() -> None:
            with self.capp.connection() as connection:
                receiver = EventReceiver(connection, handlers={"*": self.on_event}, app=self.capp)
                if failed.failures:
                    log.warning("events are received again")
                failed.end()
                receiver.capture(limit=None, timeout=None, wakeup=True)

        def told(error: Exception, _: float) -> None:
            if failed.failures == 1:
                log.warning("no events can be received, and pages stand still; trying again: %s", error)

        while True:
            # On any error: if this thread ended, pages would stand still.
            ASIDE.call(receive, Exception, failed=told, streak=failed)
