"""The proxies of HTTP that the environment names."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass


class Proxy(NamedTuple):
    """Where a proxy is, and the headers with which it lets somebody in."""

    host: str
    port: int
    headers: Mapping[str, str]


def proxy_of(scheme: str, host: str) -> Proxy | None:
    """The proxy for a host, by `https_proxy`, `http_proxy` and `no_proxy`; None if there is none."""
    named = None if proxy_bypass(host) else getproxies().get(scheme)
    if not named:
        return None
    parts = urlsplit(named)
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    headers = {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"} if parts.username else {}
    return Proxy(str(parts.hostname), parts.port or 80, headers)
