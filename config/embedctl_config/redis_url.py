"""The URL for connecting to Redis, with its password, and the options that check its certificate."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from embedctl_config.address import Address
from embedctl_config.errors import SettingsError
from embedctl_config.settings import NO_REDIS, NOT_BY_GATEWAY, Settings, expanded

#: Options that a URL may hold → the values allowed for them: none of these turns a check off.
_CHECKS: Mapping[str, frozenset[str]] = {
    "ssl_cert_reqs": frozenset({"required", "cert_required"}),
    "ssl_check_hostname": frozenset({"true", "1", "yes"}),
}
_CERTIFICATES = "ssl_ca_certs"
_SENTINEL_PORT = 26379
_SENTINELS_FILE = "sentinel_password_file"
_URL_OF_SENTINELS = re.compile(r"(rediss?\+sentinel://)([^/?#]*)(.*)", re.IGNORECASE)
_SENTINEL_FORM = "redis+sentinel://[user:password@]host[:port],host[:port],…/MASTER[/database]"


@dataclass(frozen=True, slots=True)
class Sentinels:
    """The Redis Sentinels that know which instance is the master.

    Attributes:
        master: the name that they have for the master and its replicas.
        options: how to connect to them, as redis-py's arguments.
    """

    addresses: tuple[Address, ...]
    master: str
    options: Mapping[str, Any]


class SentinelPassword:
    """The password of the sentinels, in the form of redis-py's `CredentialProvider`.

    Its file is read at each new connection, because the password may change. It is no `str`, so that no description of
    a connection shows it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def get_credentials(self) -> tuple[str]:
        """The password alone, without a user."""
        return (read_password(self._file, _SENTINELS_FILE),)


def sentinels_of(settings: Settings) -> Sentinels | None:
    """The sentinels that `redis_url` names; None if it names an instance itself.

    Raises SettingsError if it names no master, or if an address or the file of the sentinels' password can't be read.
    """
    parts = _split(settings.redis_url)
    if not _is_of_sentinels(parts):
        return None
    master = parts.path.strip("/").partition("/")[0]
    if not master:
        raise SettingsError(f"redis_url does not name the master: write {_SENTINEL_FORM}")
    options: dict[str, Any] = {"socket_timeout": 3, "socket_connect_timeout": 3, **tls_options(settings)}
    if parts.scheme.startswith("rediss"):
        options["ssl"] = True
    if settings.sentinel_password_file:
        password = SentinelPassword(expanded(settings.sentinel_password_file, _SENTINELS_FILE))
        password.get_credentials()  # what is wrong with the file is said now
        options["credential_provider"] = password
    hosts = parts.netloc.rpartition("@")[2].split(",")
    try:
        return Sentinels(tuple(Address.parse(host, _SENTINEL_PORT) for host in hosts), master, options)
    except ValueError:
        raise SettingsError(f"redis_url: the address of a sentinel can't be read: write {_SENTINEL_FORM}") from None


def _is_of_sentinels(parts: SplitResult) -> bool:
    return parts.scheme in ("redis+sentinel", "rediss+sentinel")


def secret_url(settings: Settings) -> str:
    """The URL to connect to, in redis-py's form. Never show it.

    If `redis_url` names sentinels, the host is that of one of them, and the master's takes its place.

    It contains the password of `redis_password_file`, and none of the options that :func:`tls_options` returns. Raises
    SettingsError if `redis_url` is empty or can't be parsed, the file can't be read, or both hold a password.
    """
    parts = _parts(settings)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in (*_CHECKS, *([_CERTIFICATES] if settings.tls_ca_file else [])):
        query.pop(name, None)
    if settings.redis_password_file:
        user, host = _user_and_host(parts, query)
        password = read_password(expanded(settings.redis_password_file, "redis_password_file"), "redis_password_file")
        parts = parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}")
    # By hand: urlunsplit would leave the slashes out of unix:///path.
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{urlencode(query)}" if query else "")


def tls_options(settings: Settings) -> dict[str, Any]:
    """Arguments for redis-py's connections that say how to check Redis' certificate; empty without TLS.

    Raises SettingsError if the URL turns a check off, which only `insecure` may do; if it has TLS options, but not the
    scheme rediss://; or if `tls_ca_file` holds no certificates.
    """
    parts = _parts(settings)
    query = {name: value for name, value in parse_qsl(parts.query) if name.startswith("ssl_")}
    if parts.scheme != "rediss":
        if query:
            raise SettingsError(
                f"redis_url: {', '.join(sorted(query))} is for rediss://, and this is {parts.scheme}://"
            )
        return {}
    if settings.insecure:
        return {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    for name, harmless in _CHECKS.items():
        if query.get(name, "required" if name == "ssl_cert_reqs" else "true").lower() not in harmless:
            raise SettingsError(
                f"redis_url: {name} would leave Redis' certificate unchecked, and anyone on the network path could "
                "read and change everything. Name the authority's certificate in tls_ca_file, or accept the risk "
                "with --insecure"
            )
    options: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    if settings.tls_ca_file:
        options[_CERTIFICATES] = certificates(settings.tls_ca_file)
    return options


def database_of(url: str) -> int:
    """The number of the database in a URL, 0 if it names none; raises SettingsError if it is not a number."""
    parts = _as_one_instance(_split(url))
    named = dict(parse_qsl(parts.query)).get("db") or ("" if parts.scheme == "unix" else parts.path.strip("/"))
    if named and not (named.isascii() and named.isdecimal()):
        raise SettingsError("redis_url: its database is not a number; write redis://host:port/0")
    return int(named or 0)


def _parts(settings: Settings) -> SplitResult:
    if not settings.redis_url:
        raise SettingsError(NOT_BY_GATEWAY if settings.url else NO_REDIS)
    return _as_one_instance(_split(settings.redis_url))


def _as_one_instance(parts: SplitResult) -> SplitResult:
    """A URL that names sentinels as one that names an instance, which has the first sentinel's address."""
    if not _is_of_sentinels(parts):
        return parts
    user, at, hosts = parts.netloc.rpartition("@")
    database = parts.path.strip("/").partition("/")[2]
    scheme = parts.scheme.partition("+")[0]
    return parts._replace(scheme=scheme, netloc=f"{user}{at}{hosts.partition(',')[0]}", path=f"/{database}")


def _split(url: str) -> SplitResult:
    # `urlsplit` of newer Pythons takes brackets around a whole host alone, but one of several sentinels may have an
    # IPv6 address.
    found = _URL_OF_SENTINELS.match(url)
    try:
        return urlsplit(f"{found[1]}{found[3]}")._replace(netloc=found[2]) if found else urlsplit(url)
    except ValueError:
        # Show neither the URL nor the reason: a part that can't be parsed may be a password.
        raise SettingsError("redis_url can't be read as redis://[user:password@]host[:port][/database]") from None


def _user_and_host(parts: SplitResult, query: dict[str, str]) -> tuple[str, str]:
    """The user, percent-encoded, and the host; a user in the query is taken out of it."""
    before, _, host = parts.netloc.rpartition("@")
    user, _, password = before.partition(":")
    if password or query.pop("password", ""):
        raise SettingsError("redis_url holds a password and redis_password_file names another: leave one of them out")
    return user or quote(query.pop("username", ""), safe=""), host


def read_password(file: Path, setting: str) -> str:
    """A file's content without the line's end; raises SettingsError, which names the setting, if there is none."""
    try:
        password = file.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise SettingsError(f"{setting}: {file} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {file} is not UTF-8") from None  # the error would quote its bytes
    if not password:
        raise SettingsError(f"{setting}: {file} is empty")
    return password


def certificates(path: str) -> str:
    """The path of a file with CA certificates; raises SettingsError if it holds none."""
    file = expanded(path, "tls_ca_file")
    try:
        ssl.create_default_context(cafile=str(file))
    except ssl.SSLError as error:
        raise SettingsError(f"tls_ca_file: {file} holds no certificates in PEM: {error.reason or error}") from None
    except OSError as error:
        raise SettingsError(f"tls_ca_file: {file} can't be read: {error.strerror or error}") from None
    return str(file)
