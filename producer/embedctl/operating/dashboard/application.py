"""Flower's web application, corrected where it shows our broker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from celery.events import EventReceiver

from embedctl.queueing.broker import Broker
from embedctl.store.connection import without_password
from embedctl.waiting.overview import Gatherer
from embedctl_config import keys
from embedctl_config.address import is_loopback
from embedctl_config.celery_app import make_celery
from embedctl_config.errors import EmbedctlError, MissingExtra
from embedctl_config.retry import ASIDE, Streak

try:
    from flower.api.tasks import GetQueueLengths
    from flower.app import Flower
    from flower.events import Events
    from flower.options import options
    from flower.views.broker import BrokerView
    from flower.views.monitor import Metrics
    from tornado import web
    from tornado.httputil import HTTPServerRequest
    from tornado.ioloop import IOLoop
except ImportError as error:
    raise MissingExtra("flower", "the dashboard") from error

log = logging.getLogger(__name__)


class RetryingEvents(Events):  # type: ignore[misc]  # Flower ships no types
    """Flower's receiver of events, with a short pause between attempts. Flower doubles the pause after each attempt,
    and so still waits long after the end of a long outage."""

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


class Dashboard(Flower):  # type: ignore[misc]  # Flower ships no types
    """Flower, configured by its global options. Its own reader of queue lengths supports no Redis users on a unix
    socket, and shows no queue whose workers have not answered it. So ours replaces it."""

    def __init__(self, broker: Broker, page_settings: Mapping[str, Any]) -> None:
        app, io_loop = make_celery(broker.settings), IOLoop.current()
        events = RetryingEvents(
            app,
            io_loop,
            db=options.db,
            persistent=options.persistent,
            enable_events=options.enable_events,
            state_save_interval=options.state_save_interval,
            max_workers_in_memory=options.max_workers,
            max_tasks_in_memory=options.max_tasks,
        )
        super().__init__(capp=app, options=options, events=events, io_loop=io_loop, **page_settings)
        self._broker = broker
        prefix = f"/{options.url_prefix.strip('/')}" if options.url_prefix else ""
        # These come before Flower's own handlers of the same paths.
        self.add_handlers(
            ".*",
            [
                (f"{prefix}/broker", _BrokerPage),
                (f"{prefix}/api/queues/length", _QueueLengths),
                (f"{prefix}/metrics", _Metrics),
            ],
        )

    @property
    def broker_uri(self) -> str:
        """The broker's URL as pages show it, without the password."""
        return without_password(self._broker.settings.redis_url)

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        """The handler of a request. Without authentication, requests from other sites' pages are refused."""
        if not options.basic_auth and _from_elsewhere(request):
            return self.get_handler_delegate(request, _Refusal)
        return super().find_handler(request, **kwargs)

    async def queues(self, _: object) -> list[dict[str, Any]]:
        """Flower's question to a broker: the queues, and the number of messages that wait in each; raises HTTPError if
        Redis can't be reached, or its access list does not permit this."""
        try:
            return await self.io_loop.run_in_executor(None, _queue_rows, self._broker)  # type: ignore[no-any-return]
        except EmbedctlError as error:
            raise web.HTTPError(503, "%s", str(error)) from error


class _OurQueues:
    """A mixin for handlers that show queues: reads all queues with workers or jobs over our own connection."""

    application: Dashboard

    def get_broker(self) -> Dashboard:
        return self.application

    def get_active_queue_names(self) -> list[str]:
        return []  # the dashboard finds them itself


class _BrokerPage(_OurQueues, BrokerView):  # type: ignore[misc]  # Flower ships no types
    """`/broker`."""


class _QueueLengths(_OurQueues, GetQueueLengths):  # type: ignore[misc]  # Flower ships no types
    """`/api/queues/length`."""


class _Metrics(Metrics):  # type: ignore[misc]  # Flower ships no types
    """`/metrics`, which Flower shows without authentication."""

    @web.authenticated
    async def get(self) -> None:
        await super().get()


class _Refusal(web.RequestHandler):
    """The answer to a browser's request from another site's page."""

    def prepare(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=UTF-8")
        self.finish(
            "Without an --auth-file, this dashboard answers only requests to a name of its own machine, such as "
            "http://127.0.0.1, and none from another site's pages.\n"
        )


def _from_elsewhere(request: HTTPServerRequest) -> bool:
    """Whether another site's page sent the request, by DNS rebinding or across origins."""
    origin = request.headers.get("Origin")
    return not is_loopback(request.host_name) or (origin is not None and urlsplit(origin).netloc != request.host)


def _queue_rows(broker: Broker) -> list[dict[str, Any]]:
    return [
        {
            "name": keys.queue(queue.hardware, queue.model),
            "messages": queue.chunks,
            "messages_ready": queue.chunks,
            "consumers": queue.workers,
        }
        for queue in Gatherer(broker).look().queues
    ]
