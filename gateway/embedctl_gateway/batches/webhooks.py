"""Tells a URL of the operator's that a batch has ended, as Standard Webhooks 1.0 does: signed, and tried again. The
body is that of OpenAI's events, so the official clients verify and read it."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from embedctl.common.notices import Reminder
from embedctl.store.webhook_events import Event, EventStore
from embedctl_config.errors import BrokerUnavailable, NotPermitted, SettingsError
from embedctl_config.redis_url import read_password
from embedctl_config.retry import ASIDE
from embedctl_config.settings import Settings, expanded, is_web_url

log = logging.getLogger(__name__)

#: Pauses between tries, those of Standard Webhooks' senders; after the last one an event is given up (seconds). Redis
#: holds the number of tries, because the gateway may end meanwhile.
PAUSES_S = (5, 300, 1800, 7200, 28_800, 86_400)
#: The receiver may take this long to connect, and to answer (seconds).
_PATIENCE_S = 10.0
#: A process that tells an event for so long counts as dead (seconds).
_LEASE_S = 60.0
#: Between two looks for an event (seconds).
_LOOK_S = 1.0
#: How long a gateway that ends waits for a try (seconds).
_STOP_S = 1.0
_PREFIX = "whsec_"
#: Of a secret, in bytes.
_SHORTEST, _LONGEST = 24, 64


@dataclass(frozen=True)
class Receiver:
    """Whom the events are told. The secret signs them; no description shows it."""

    url: str
    secret: bytes = field(repr=False)


def receiver_of(settings: Settings) -> Receiver | None:
    """The receiver in the settings; None if there is none. Raises SettingsError if the URL is none, or the secret is
    missing or wrong."""
    url, file = settings.gateway_webhook_url, settings.gateway_webhook_secret_file
    if not url:
        return None
    if not is_web_url(url):
        raise SettingsError("gateway_webhook_url: write http:// or https://, a host and a path, without a password")
    if not file:
        raise SettingsError("gateway_webhook_secret_file: name a file with the secret of gateway_webhook_url")
    text = read_password(expanded(file, "gateway_webhook_secret_file"), "gateway_webhook_secret_file").strip()
    try:
        secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True) if text.startswith(_PREFIX) else b""
    except ValueError:  # also of base64 that is none
        secret = b""
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise SettingsError(
            f"gateway_webhook_secret_file: the secret is not {_PREFIX} and then {_SHORTEST} to {_LONGEST} bytes in "
            "base64. Make one with: echo whsec_$(openssl rand -base64 32)"
        )
    return Receiver(url, secret)


def signature(secret: bytes, event_id: str, timestamp: int, body: bytes) -> str:
    """The header `webhook-signature`: version 1, HMAC-SHA256 of `id.timestamp.body`."""
    signed = b".".join((event_id.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()


class Webhooks:
    """The thread of one gateway that tells events. `count` is called with what became of a try: `delivered`, `failed`
    or `given_up`."""

    def __init__(self, receiver: Receiver, events: EventStore, count: Callable[[str], None]) -> None:
        self._receiver = receiver
        self._events = events
        self._count = count
        self._remind = Reminder(log.warning)
        self._stopping = threading.Event()
        serving = (self._step, self._failed, self._stopping)
        self._thread = threading.Thread(target=ASIDE.serve, args=serving, name="webhooks", daemon=True)
        # A redirect would lead to a URL that the operator has not named.
        self._opener = urllib.request.build_opener(_NoRedirects)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End soon. What is not told is told by another gateway, or by the next one."""
        self._stopping.set()
        self._thread.join(_STOP_S)

    def _failed(self, error: Exception, _: float) -> None:
        if isinstance(error, NotPermitted):  # the operator, who can mend Redis' access list, is to know
            self._remind(f"nobody is told that batches end: {error}")
        elif not isinstance(error, BrokerUnavailable):  # nothing else tells the ends of batches: the thread goes on
            log.error("a webhook is tried again", exc_info=error)

    def _step(self) -> float:
        """Tell an event; returns the pause before the next look (seconds)."""
        token = secrets.token_hex(8)
        event = self._events.take(token, _LEASE_S)
        if event is None:
            return _LOOK_S
        problem = self._told(event)
        if problem is None:
            self._events.note(event, token, None)
            self._count("delivered")
        elif event.tries < len(PAUSES_S):
            pause_s = PAUSES_S[event.tries]
            log.warning("the webhook of %s is tried again in %d s: %s", event.batch_id, pause_s, problem)
            self._events.note(event, token, pause_s)
            self._count("failed")
        else:
            log.error("the webhook of %s is given up after %d tries: %s", event.batch_id, event.tries + 1, problem)
            self._events.note(event, token, None)
            self._count("given_up")
        return 0.0

    def _told(self, event: Event) -> str | None:
        """Tell an event; returns what went wrong, or None."""
        body, timestamp = _body(event), int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": "embedctl",
            "webhook-id": event.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self._receiver.secret, event.id, timestamp, body),
        }
        request = urllib.request.Request(self._receiver.url, body, headers, method="POST")  # noqa: S310  (http or https)
        try:
            with self._opener.open(request, timeout=_PATIENCE_S) as answer:
                return None if 200 <= answer.status < 300 else f"status {answer.status}"
        except urllib.error.HTTPError as error:
            error.close()
            return f"status {error.code}"
        except (OSError, HTTPException, ValueError) as error:  # no connection, no answer in time, or none in HTTP
            return str(getattr(error, "reason", error)) or type(error).__name__


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect as a failure."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _body(event: Event) -> bytes:
    """The same at each try."""
    told = {
        "id": event.id,
        "object": "event",
        "created_at": event.created_s,
        "type": event.type,
        "data": {"id": event.batch_id},
    }
    return json.dumps(told, separators=(",", ":")).encode()
