"""The Celery application, configured the same way for producers, workers and Flower."""

from __future__ import annotations

from urllib.parse import parse_qs, quote, urlencode, urlsplit, urlunsplit

from celery import Celery

from embedctl_config.errors import SettingsError
from embedctl_config.settings import NO_REDIS, Settings

#: The one task: look at a chunk of a job.
TASK = "embedctl.encode"


def make_celery(settings: Settings) -> Celery:
    """A Celery application on the broker of these settings.

    A ticket only says where to look, so redelivery by the transport is a slow backstop: every process must share one
    visibility timeout, which is why it is no setting.

    Raises:
        SettingsError: `redis_url` is empty.
    """
    app = Celery("embedctl", set_as_current=False)
    app.conf.update(
        broker_url=broker_url(settings.redis_url),
        broker_transport_options={
            "visibility_timeout": 3600,
            "priority_steps": [0],
            "queue_order_strategy": "priority",
            # A half-open connection hangs for good without these four. Never retry_on_timeout: it turns off
            # kombu's batched publishing.
            "socket_timeout": 10,
            "socket_connect_timeout": 3,
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_channel_error_retry=True,  # a full Redis is such an error, and must not end a worker
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


def broker_url(redis_url: str) -> str:
    """The broker URL that kombu understands for a URL in redis-py's form.

    `unix://` becomes `redis+socket://`, and `rediss://` checks certificates unless the URL itself says otherwise: to
    kombu, TLS without `ssl_cert_reqs` means no check at all.

    Raises:
        SettingsError: the URL is empty.
    """
    if not redis_url:
        raise SettingsError(NO_REDIS)
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
    if parts.scheme == "rediss":
        query.setdefault("ssl_cert_reqs", "required")
    return urlunsplit(parts._replace(query=urlencode(query)))
