"""Receives the events of workers and tickets for the dashboard."""

from __future__ import annotations

import logging
import time

from celery.events import EventReceiver

from embedctl_config.errors import MissingExtra

try:
    from flower.events import Events
except ImportError as error:
    raise MissingExtra("flower", "the dashboard") from error

log = logging.getLogger(__name__)
#: Pause between two attempts to reach Redis (seconds); an attempt itself takes some seconds.
_RETRY_S = 1.0


class PatientEvents(Events):  # type: ignore[misc]  # Flower ships no types
    """Flower's receiver of events, with a fixed pause between attempts.

    Flower doubles the pause after each attempt, and so still waits long after the end of a long outage.
    """

    def run(self) -> None:
        """Receive events for as long as the process lives."""
        away = False
        while True:
            try:
                with self.capp.connection() as connection:
                    receiver = EventReceiver(connection, handlers={"*": self.on_event}, app=self.capp)
                    if away:
                        log.warning("events are received again")
                    away = False
                    receiver.capture(limit=None, timeout=None, wakeup=True)
            except Exception as error:  # noqa: BLE001  (on any error: if this thread ended, pages would stand still)
                if not away:
                    log.warning("no events can be received, and pages stand still; trying again: %s", error)
                away = True
                time.sleep(_RETRY_S)
