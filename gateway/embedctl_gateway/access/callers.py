"""Who may call: the holders of keys, or everyone on this machine if there are none."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from embedctl.operating.dashboard.access import is_loopback
from embedctl_config.address import address_of
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings, expanded
from embedctl_gateway.access.key_file import hash_of, read_keys
from embedctl_gateway.http.refusals import Refusal, refuse

log = logging.getLogger(__name__)

#: The file of keys is looked at this often at most (seconds).
_LOOK_S = 1.0


class Access:
    """Knows the tenant of a request. Raises SettingsError if other machines can reach the gateway, and it has no keys,
    or if the file of keys is not valid."""

    def __init__(self, settings: Settings) -> None:
        self._tenant = settings.tenant
        self._keys = (
            Keys(expanded(settings.gateway_keys_file, "gateway_keys_file")) if settings.gateway_keys_file else None
        )
        if self._keys is None and not is_loopback(address_of(settings.gateway_address, "gateway_address").host):
            raise SettingsError(
                f"gateway_address: {settings.gateway_address!r} can be reached from other machines, and the gateway "
                "would ask nobody for a key. Make one with `embedctl gateway key add NAME --keys FILE`, and name the "
                "file with --keys or EMBEDCTL_GATEWAY_KEYS_FILE; or listen at 127.0.0.1"
            )

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    def tenant_of(self, request: Request) -> str:
        """The tenant that a request is for; raises Refusal if its key is missing or wrong, or it comes from a page of
        another site."""
        if self._keys is None:
            _check_local(request)
            return self._tenant
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        tenant = self._keys.tenant_of(key.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise Refusal(
                401,
                "the API key is wrong: give one of this gateway's, as `Authorization: Bearer KEY`"
                if key
                else "an API key is needed: `Authorization: Bearer KEY`",
                "invalid_api_key",
                None,
                {"www-authenticate": "Bearer"},
            )
        return tenant


class Keys:
    """The keys of a file, which may change at any time. While the file is missing or not valid, no key is: a key that
    was removed must not live on because of a slip. Raises SettingsError if the file is not valid at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tenants: dict[str, str] = {}
        self._facts: tuple[int, ...] = ()
        self._next_look = 0.0
        self._read()

    def tenant_of(self, key: str) -> str | None:
        self._look()
        return self._tenants.get(hash_of(key))

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        try:
            if self._facts_now() != self._facts:
                self._read()
        except (OSError, SettingsError) as error:
            if self._tenants:
                log.warning("no key is valid until this is mended: %s", error)
            self._tenants, self._facts = {}, ()

    def _read(self) -> None:
        try:
            facts = self._facts_now()
        except OSError as error:
            raise SettingsError(f"gateway_keys_file: {self._path} can't be read: {error.strerror}") from error
        self._tenants = {key.hashed: key.tenant for key in read_keys(self._path)}
        self._facts = facts

    def _facts_now(self) -> tuple[int, ...]:
        facts = os.stat(self._path)  # noqa: PTH116  (the same in fewer steps)
        return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode


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
