"""A host and a port: where a process listens, or where a sentinel does."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple, Self

from embedctl_config.errors import SettingsError

LAST_PORT = 65535
_FORM = re.compile(r"(?:\[(?P<ipv6>[^\s\[\]]*:[^\s\[\]]*)\]|(?P<host>[^\s:/@\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


class Address(NamedTuple):
    """A host, which is without brackets if it is an IPv6 address, and a port, which is 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int = -1) -> Self:
        """Read `HOST:PORT`, or `HOST` if there is a default port. An IPv6 address stands in brackets.

        Raises ValueError for another form, or if the port is too large.
        """
        found = _FORM.fullmatch(text)
        port = int(found["port"] or default_port) if found else -1
        if found is None or not 0 <= port <= LAST_PORT:
            raise ValueError(text)
        return cls(found["ipv6"] or found["host"], port)


def address_of(text: str, setting: str) -> Address:
    """Where a setting has a process listen: at `HOST:PORT`, or at a port of the loopback address if that is all."""
    try:
        return Address.parse(f"127.0.0.1:{text}" if text.isdecimal() else text)
    except ValueError:
        raise SettingsError(
            f"{setting}: {text!r} is no address to listen at: use HOST:PORT, such as 0.0.0.0:8080 or [::1]:8080, or a "
            "port alone for 127.0.0.1"
        ) from None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
