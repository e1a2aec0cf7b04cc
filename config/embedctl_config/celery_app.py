"""The Celery application, configured the same way for producers, workers and Flower."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit, urlunsplit

from celery import Celery
from celery.app.amqp import AMQP
from celery.loaders.app import AppLoader
from kombu import Connection
from kombu.utils.objects import cached_property
from kombu.utils.url import maybe_sanitize_url

from embedctl_config import keys
from embedctl_config.redis_url import Sentinels, secret_url, sentinels_of, tls_options
from embedctl_config.settings import Settings

#: The modules with classes whose cached properties publishing takes.
_WITH_LOCKS = ("celery.app.base", "celery.app.amqp", "celery.app.events", "kombu.connection", "kombu.transport.redis")


def make_celery(settings: Settings) -> Celery:
    """A Celery application on the broker of these settings. Celery's environment variables have no effect on it.

    A message only says that a queue has work, so it does no harm if the transport delivers it again. Raises
    SettingsError as `secret_url` and `tls_options`.
    """
    url, tls = _address(settings)
    sentinels = sentinels_of(settings)
    app = _OfSettings(settings)
    app.conf.update(
        broker_url=url,
        broker_use_ssl=tls or None,
        broker_transport_options={
            "visibility_timeout": 3600,
            "unacked_key": keys.UNACKED,
            "unacked_index_key": keys.UNACKED_INDEX,
            "unacked_mutex_key": keys.UNACKED_MUTEX,
            "priority_steps": [0],
            # A worker hears its queues in turn: no job waits for another model's job to end.
            "queue_order_strategy": "round_robin",
            # Without these four, a half-open connection hangs forever. Never set retry_on_timeout: it turns off
            # kombu's batched publishing.
            "socket_timeout": 10,
            "socket_connect_timeout": 3,
            "socket_keepalive": True,
            "health_check_interval": 10,
            **({} if sentinels is None else {"master_name": sentinels.master, "sentinel_kwargs": sentinels.options}),
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_channel_error_retry=True,  # a full Redis causes such an error, and must not end a worker
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=False,
        task_send_sent_event=False,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
        worker_soft_shutdown_timeout=0,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
    )
    return app


class _NoConfiguration(AppLoader):
    """A loader that ignores the module named by CELERY_CONFIG_MODULE."""

    def read_configuration(self, env: str = "") -> dict[str, Any]:
        return {}


class _OfSettings(Celery):
    """Celery's application, configured by our settings alone.

    In Celery, variables such as CELERY_BROKER_URL override an application's own configuration, and
    DJANGO_SETTINGS_MODULE makes it load that site. These variables belong to another application, in this process or in
    its parent, so they must stay in the environment.
    """

    backend_cls = "disabled"

    def __init__(self, settings: Settings) -> None:
        super().__init__("embedctl", loader=_NoConfiguration, fixups=[], set_as_current=False, amqp=_Discreet)
        self._embedctl_settings = settings

    def connection_for_read(self, url: str | None = None, **kwargs: Any) -> Connection:
        """A connection to our broker, with the current password. `url` is ignored: it comes from the environment."""
        return super().connection_for_read(_address(self._embedctl_settings)[0], **kwargs)

    def connection_for_write(self, url: str | None = None, **kwargs: Any) -> Connection:
        """As :meth:`connection_for_read`."""
        return super().connection_for_write(_address(self._embedctl_settings)[0], **kwargs)


class _KeepsClient:
    """Kombu's channels to Redis with one client for all commands: to make one takes longer than most commands.

    A channel that is closed does not put bells back that this worker has heard: its threads have them, and acknowledge
    them later. Where kombu would look for the address of a connection that it has given up, that ends in an error of a
    connection, which Celery expects; another one would end the worker.
    """

    do_restore = False
    _kept: Any = None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """As kombu's: `client`, or one that takes connections from the channel's pool."""
        channel: Any = self  # with what it is mixed into
        if channel.connection is None or channel.connection.client is None:
            raise ConnectionError("the connection was lost, and given up")
        if client is None:
            client = self._kept
            if client is None or client.connection_pool is not channel.pool:  # a lost connection replaces the pool
                client = self._kept = channel._create_client()
        yield client


@cache
def _keeping_clients(transport: Any) -> Any:
    """A class of kombu's transports to Redis, whose channels keep their clients."""
    channel = type(transport.Channel.__name__, (_KeepsClient, transport.Channel), {})
    return type(transport.__name__, (transport,), {"Channel": channel})


class _DiscreetConnection(Connection):
    """Kombu's connection with a description that holds no secret: workers give it to anyone who inspects them."""

    def get_transport_cls(self) -> type:
        transport: type = _keeping_clients(super().get_transport_cls())  # type: ignore[arg-type]  # a class has a hash
        return transport

    def info(self) -> dict[str, Any]:
        """The facts of a connection. `password` stays, for :meth:`as_uri`; Celery removes it from what it shows."""
        facts: dict[str, Any] = super().info()
        facts["hostname"] = maybe_sanitize_url(facts["hostname"])
        facts["alternates"] = [maybe_sanitize_url(each) for each in facts["alternates"]]
        if facts["ssl"]:
            facts["ssl"] = {name: value for name, value in facts["ssl"].items() if name != "ssl_password"}
        options = facts["transport_options"] or {}
        if "sentinel_kwargs" in options:
            shown = {name: value for name, value in options["sentinel_kwargs"].items() if name != "credential_provider"}
            facts["transport_options"] = {**options, "sentinel_kwargs": shown}
        return facts


class _Discreet(AMQP):
    Connection = _DiscreetConnection


def _address(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The broker's URL in kombu's form, with its password, and the TLS options, which are empty without TLS."""
    url, tls = _kombu_url(secret_url(settings)), tls_options(settings)
    if tls:
        # Kombu and Flower read options in the URL differently. Flower expects them outside of it.
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        tls = {**{name: value for name, value in query.items() if name.startswith("ssl_")}, **tls}
        left = {name: value for name, value in query.items() if name not in tls}
        url = urlunsplit(parts._replace(query=urlencode(left)))
    sentinels = sentinels_of(settings)
    return url if sentinels is None else _of_sentinels(url, sentinels), tls


def _of_sentinels(url: str, sentinels: Sentinels) -> str:
    """Kombu's form: one URL for each sentinel, all with the user, the password and the database of the master."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    urls = (parts._replace(scheme="sentinel", netloc=f"{user}{at}{each}") for each in sentinels.addresses)
    return ";".join(map(urlunsplit, urls))


def _kombu_url(redis_url: str) -> str:
    """Convert a URL from redis-py's form to kombu's: `unix://` becomes `redis+socket://`."""
    parts = urlsplit(redis_url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    database = query.pop("db", None)
    if parts.scheme == "unix":
        if database is not None:
            query["virtual_host"] = database
        user, password = quote(query.pop("username", ""), safe=""), quote(query.pop("password", ""), safe="")
        location = parts.netloc or (f"{user}:{password}@" if user or password else "")
        return f"redis+socket://{location}{parts.path}" + (f"?{urlencode(query)}" if query else "")
    if database is not None:
        parts = parts._replace(path=f"/{database}")
    return urlunsplit(parts._replace(query=urlencode(query)))


def _renew_locks() -> None:
    """Replace the locks of kombu's cached properties in a forked child: a thread of the parent may have held one.

    A lock belongs to the class, so every access through any application takes it.
    """
    modules = filter(None, map(sys.modules.get, _WITH_LOCKS))
    classes = [found for module in modules for found in vars(module).values() if isinstance(found, type)]
    for each in [attribute for found in classes for attribute in vars(found).values()]:
        if isinstance(each, cached_property):
            each.lock = RLock()  # type: ignore[attr-defined]  # functools' in Python 3.11, or its own


os.register_at_fork(after_in_child=_renew_locks)
