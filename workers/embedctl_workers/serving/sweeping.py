"""The thread that removes what nobody needs of the chunks outside of Redis."""

from __future__ import annotations

import logging
import threading

from embedctl.queueing.broker import Broker
from embedctl.queueing.sweeper import Sweeper
from embedctl_config.errors import EmbedctlError

log = logging.getLogger(__name__)

#: Seconds between two rounds.
_INTERVAL_S = 60.0


def start_sweeping(broker: Broker, stop: threading.Event) -> None:
    """Sweep in a thread until the event is set, if these settings keep chunks outside of Redis.

    A thread of its own: a place that does not answer holds up nothing else.
    """
    if not broker.chunk_files.is_outside:
        return
    sweeper = Sweeper(broker)

    def sweep() -> None:
        while not stop.wait(_INTERVAL_S):
            try:
                sweeper.round()
            except EmbedctlError as error:
                log.warning("sweeper: %s", error)
            except Exception:
                log.exception("sweeper: a round failed")

    threading.Thread(target=sweep, name="sweeper", daemon=True).start()
