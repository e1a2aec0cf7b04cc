"""How the dashboard hears of workers and tickets."""

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
#: Between two tries to reach a Redis that is away; each try takes some seconds itself.
_RETRY_S = 1.0


class PatientEvents(Events):  # type: ignore[misc]  # Flower ships no types
    """Flower's receiver of events. Flower itself waits twice as long after each try, and so is blind for long after a
    long outage."""

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
            except Exception as error:  # noqa: BLE001  (whatever it is: a thread that ends leaves pages that stand still)
                if not away:
                    log.warning("no events can be received, and pages stand still; trying on: %s", error)
                away = True
                time.sleep(_RETRY_S)
