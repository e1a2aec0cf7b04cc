"""Runs the monitor: watches Redis, listens, stops cleanly."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from embedctl.operating.monitoring.endpoint import Endpoint
from embedctl.operating.monitoring.watch import Watch
from embedctl.queueing.broker import Broker
from embedctl_config.errors import MissingExtra
from embedctl_config.settings import Settings

try:
    from embedctl.operating.monitoring.metrics import BacklogMetrics
except ModuleNotFoundError as error:
    raise MissingExtra("metrics", "`embedctl metrics`") from error


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve the metrics of the backlog until SIGTERM, or Ctrl-C, which is raised; `say` is told where they are. While
    Redis is away, it waits. Raises SettingsError if the port can't be used, and as :meth:`Watch.wait`."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    broker = Broker.connect(settings)
    watch = Watch(broker)
    signal.signal(signal.SIGTERM, lambda *_: watch.stop())
    watch.start()  # before anybody can ask whether it runs
    with Endpoint(settings.metrics_address or "0", BacklogMetrics(watch).page, watch) as endpoint:
        say(f"metrics and health: {endpoint.url}/metrics, /healthz, /readyz; stop with Ctrl-C")
        try:
            watch.wait()
        finally:
            watch.stop()
            broker.close()
