"""Who may call, and what: the holders of keys, or everyone on this machine if there are none. Who guesses keys
waits."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from embedctl.common.notices import Reminder
from embedctl_config.address import is_loopback
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings, expanded
from embedctl_gateway.access.key_file import Key, hash_of, keys_in, text_of
from embedctl_gateway.access.verbs import VERBS
from embedctl_gateway.http.refusals import Refusal, refuse

#: So many wrong keys of an address are answered at once, and then one in each of these seconds.
_AT_ONCE, _EVERY_S = 20, 1.0
#: The longest pause (seconds).
_LONGEST_PAUSE_S = 10.0
#: Most addresses that are remembered.
_MOST_ADDRESSES = 10_000
log = logging.getLogger(__name__)

#: A key in the bytes of a request's head. Only so many bytes are searched, because that comes before a client's turn.
_KEY, _SEARCHED = re.compile(rb"\nauthorization:[ \t]*+bearer[ \t]++([!-~]+)", re.IGNORECASE), 8 * 1024
#: The file of keys is read this often at most (seconds).
_LOOK_S = 0.5


class Guesses:
    """Tells how long the answer to a wrong key waits. A client that guesses keys so takes little time of the gateway.
    Clients with a right key never wait, not even at the same address."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        #: Address → when all of its guesses are paid for, each with its seconds; the address that guessed last is last.
        self._paid_at: OrderedDict[str, float] = OrderedDict()

    def pause_s(self, address: str) -> float:
        """The pause before a wrong key from this address is answered (seconds), which is counted."""
        network, now = _network_of(address), self._now()
        free_s = _AT_ONCE * _EVERY_S
        paid_at = min(max(now, self._paid_at.pop(network, now)) + _EVERY_S, now + free_s + _LONGEST_PAUSE_S)
        self._paid_at[network] = paid_at
        if len(self._paid_at) > _MOST_ADDRESSES:
            self._paid_at.popitem(last=False)
        return max(0.0, paid_at - now - free_s)


def _network_of(address: str) -> str:
    """An address, or of IPv6 the network, all of whose addresses one client may use."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6 and found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(found) if found.version == 4 else str(int(found) >> 64)


class WrongKey(Refusal):
    """Raised for a request without a key, or with a wrong one. It is answered after a pause (seconds), which is 0
    unless its address has shown many of them."""

    def __init__(self, message: str, pause_s: float) -> None:
        close = {"connection": "close"} if pause_s else {}
        super().__init__(401, message, "invalid_api_key", None, {"www-authenticate": "Bearer", **close})
        self.pause_s = pause_s


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a tenant, and the verbs of its key. Nobody, who needs no key, is the tenant of an empty name."""

    tenant: str = ""
    verbs: tuple[str, ...] = ()

    def need(self, verbs: tuple[str, ...]) -> None:
        """Raises Refusal if the caller's key is for none of these verbs."""
        if verbs and not set(verbs) & set(self.verbs):
            lacking = " or ".join(verbs)
            raise Refusal(
                403,
                f"this key may not do that: it is for {', '.join(self.verbs)}, and the call needs one for {lacking}",
                "missing_scope",
                None,
                {"www-authenticate": f'Bearer error="insufficient_scope", scope="{" ".join(verbs)}"'},
            )


class Access:
    """Knows the caller of a request. Raises SettingsError if the file of keys is not valid."""

    def __init__(self, settings: Settings) -> None:
        self._everyone = Caller(settings.tenant, tuple(VERBS))
        self._keys = (
            Keys(expanded(settings.gateway_keys_file, "gateway_keys_file")) if settings.gateway_keys_file else None
        )
        self._guesses = Guesses()

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    def tenant_of(self, head: bytes) -> str:
        """The tenant of the right key in the bytes of a request's head, not parsed yet; empty if there is none."""
        shown = _KEY.search(head, 0, _SEARCHED) if self._keys is not None else None
        found = self._keys.find(shown[1].decode()) if shown and self._keys is not None else None
        return found.tenant if found else ""

    def caller_of(self, request: Request) -> Caller:
        """Who makes a request; raises WrongKey if its key is missing or wrong, and Refusal if it comes from a page of
        another site."""
        if self._keys is None:
            _check_local(request)
            return self._everyone
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        found = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            raise WrongKey(
                "the API key is wrong: give one of this gateway's, as `Authorization: Bearer KEY`"
                if key
                else "an API key is needed: `Authorization: Bearer KEY`",
                self._guesses.pause_s(request.client.host if request.client else ""),
            )
        return Caller(found.tenant, found.verbs)


class Keys:
    """The keys of a file, which may change at any time. While the file is missing or not valid, the keys that were read
    last count, and the log says so. Raises SettingsError if the file is not valid at the start."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._remind = Reminder(log.error)
        self._text = ""
        self._keys: dict[str, Key] = {}
        self._next_look = 0.0
        self._read()

    def find(self, key: str) -> Key | None:
        now = self._now()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            try:
                self._read()
                self._remind("")
            except SettingsError as error:
                self._remind(f"the keys of before stay valid until this is mended: {error}")
        return self._keys.get(hash_of(key))

    def _read(self) -> None:
        # Its size and time would not tell every change: another file may have them too.
        text = text_of(self._path)
        if text != self._text:
            self._keys = {key.hashed: key for key in keys_in(text, self._path)}
            self._text = text


def _check_local(request: Request) -> None:
    """Refuse what a browser sends for a page of another site, which may use a name that leads here."""
    host = request.headers.get("host", "")
    if host and not is_loopback(_name_in(f"//{host}")):
        refuse("without keys, the gateway answers only at localhost or a loopback address", "forbidden", None, 403)
    origin = request.headers.get("origin", "")
    if origin and not is_loopback(_name_in(origin)):
        refuse("without keys, the gateway answers no page of another site", "forbidden", None, 403)


def _name_in(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
