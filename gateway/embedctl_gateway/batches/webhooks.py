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
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from embedctl.common.notices import Reminder
from embedctl.store.batches import Event, EventStore
from embedctl_config.errors import BrokerUnavailable, NotPermitted, SettingsError
from embedctl_config.redis_url import read_password
from embedctl_config.retry import ASIDE
from embedctl_config.settings import Settings, expanded, is_web_url
from embedctl_gateway.http.addresses import Network, address_in, is_public, networks_of
from embedctl_gateway.http.outward import NotSent, Outward

log = logging.getLogger(__name__)

#: Pauses between tries, those of Standard Webhooks' senders; after the last one an event is given up (seconds). Redis
#: holds the number of tries, because the gateway may end meanwhile.
PAUSES_S = (5, 300, 1800, 7200, 28_800, 86_400)
#: A whole try may take this long (seconds).
_TRY_S = 10.0
#: Tries at a time, so that one that takes long holds up no other.
_TRIES = 4
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
    networks: tuple[Network, ...] = ()


def receiver_of(settings: Settings) -> Receiver | None:
    """The receiver in the settings; None if there is none. Raises SettingsError if the URL is none or must not be used,
    or the secret is missing or wrong."""
    url, file = settings.gateway_webhook_url, settings.gateway_webhook_secret_file
    if not url:
        return None
    networks = networks_of(settings.gateway_webhook_networks, "gateway_webhook_networks")
    _check_url(url, networks)
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
    return Receiver(url, secret, networks)


def _check_url(url: str, networks: tuple[Network, ...]) -> None:
    if not is_web_url(url):
        raise SettingsError("gateway_webhook_url: write https://, a host and a path, in ASCII and without a password")
    parts = urlsplit(url)
    if parts.scheme == "http" and not networks:
        raise SettingsError(
            "gateway_webhook_url: write https://. Only into a network of gateway_webhook_networks may it be http://"
        )
    try:
        address = address_in(parts.hostname or "")
    except ValueError:  # a name, which is resolved at each try
        return
    if not is_public(address) and not any(address in network for network in networks):
        raise SettingsError(
            f"gateway_webhook_url: {address} is no public address. If you mean it, name its network in "
            "gateway_webhook_networks"
        )


def signature(secret: bytes, event_id: str, timestamp: int, body: bytes) -> str:
    """The header `webhook-signature`: version 1, HMAC-SHA256 of `id.timestamp.body`."""
    signed = b".".join((event_id.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()


class Webhooks:
    """The threads of one gateway that tell events. `count` is called with what became of a try: `delivered`, `failed`
    or `given_up`."""

    def __init__(self, receiver: Receiver, events: EventStore, count: Callable[[str], None]) -> None:
        self._secret = receiver.secret
        self._outward = Outward(receiver.url, receiver.networks)
        self._events = events
        self._count = count
        self._remind = Reminder(log.warning)
        self._stopping = threading.Event()
        serving = (self._step, self._failed, self._stopping)
        self._threads = [
            threading.Thread(target=ASIDE.serve, args=serving, name=f"webhooks-{number}", daemon=True)
            for number in range(_TRIES)
        ]

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """End soon. What is not told is told by another gateway, or by the next one."""
        self._stopping.set()
        until = time.monotonic() + _STOP_S
        for each in self._threads:
            each.join(max(0.0, until - time.monotonic()))

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
            "webhook-signature": signature(self._secret, event.id, timestamp, body),
        }
        try:
            status = self._outward.post(body, headers, _TRY_S)
        except NotSent as error:
            return str(error)
        # A redirect is a failure: it leads to a URL that the operator has not named.
        return None if 200 <= status < 300 else f"status {status}"


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
