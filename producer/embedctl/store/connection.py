"""The connection to Redis: time-outs, retries, scripts, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from embedctl_config import keys, wire
from embedctl_config.errors import BrokerFull, BrokerUnavailable, SettingsError
from embedctl_config.settings import NO_REDIS, Settings

#: The oldest Redis whose commands the scripts use.
OLDEST_REDIS = (6, 2)
#: Longest blocking read in ms: well under the socket's time-out.
MAX_BLOCK_MS = 5000
_SOCKET_TIMEOUT_S = 10
#: What ends the part of a URL in which a password may stand.
_SEPARATORS = frozenset("/?#")


class Connection:
    """A pool of connections to the Redis of these settings. Safe to share between threads.

    Raises:
        SettingsError: no Redis is configured, or its URL can't be read.
    """

    def __init__(self, settings: Settings) -> None:
        if not settings.redis_url:
            raise SettingsError(NO_REDIS)
        self._shown_url = without_password(settings.redis_url)
        try:
            self._redis = redis.Redis.from_url(
                settings.redis_url,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=3,
                **({} if settings.redis_url.startswith("unix:") else {"socket_keepalive": True}),
                health_check_interval=10,
                retry=Retry(ExponentialBackoff(cap=1, base=0.05), 3),
            )
        except ValueError:
            # Neither the URL nor the reason is shown: what can't be told apart may be a password.
            raise SettingsError("redis_url can't be read as redis://[user:password@]host[:port][/database]") from None
        self._scripts: dict[str, Any] = {}

    @contextmanager
    def client(self) -> Iterator[Any]:
        """The redis-py client; its errors leave as :class:`BrokerUnavailable`.

        Typed Any: redis-py's own return types are unions of its sync and async forms.
        """
        try:
            yield self._redis
        except redis.exceptions.AuthenticationError as error:
            raise BrokerUnavailable(f"Redis at {self._shown_url} refuses the user or the password: {error}") from error
        except OutOfMemoryError as error:
            raise self._full() from error
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
            reason = str(error).rstrip(".")
            raise BrokerUnavailable(
                f"Redis at {self._shown_url} can't be reached: {reason}. Does it run, and is EMBEDCTL_REDIS_URL right?"
            ) from error
        except redis.exceptions.ResponseError as error:
            if "OOM command not allowed" in str(error):  # raised inside a script, where redis-py does not know it
                raise self._full() from error
            raise BrokerUnavailable(f"Redis at {self._shown_url} refused a command: {error}") from error

    def _full(self) -> BrokerFull:
        return BrokerFull(
            f"Redis at {self._shown_url} is full: `embedctl list` and `embedctl discard` old jobs, or raise "
            "its maxmemory"
        )

    def script(self, name: str, script_keys: Sequence[str], args: Sequence[Any] = ()) -> tuple[str, list[Any]]:
        """Run a script: its answer and what came with it."""
        with self.client() as client:
            script = self._scripts.get(name)
            if script is None:
                script = self._scripts[name] = client.register_script(script_source(name))
            answer, *rest = script(keys=script_keys, args=args)
        return answer.decode(), rest

    def now_ms(self) -> int:
        """Redis' clock."""
        with self.client() as client:
            seconds, micros = client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def uptime_s(self) -> int:
        """Whole seconds since Redis started."""
        with self.client() as client:
            return int(client.info("server")["uptime_in_seconds"])

    def check_server(self) -> None:
        """Refuse a Redis that can't keep jobs.

        Raises:
            BrokerUnavailable: it is too old, or may evict keys.
        """
        with self.client() as client:
            info = {**client.info("server"), **client.info("memory")}
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
            raise BrokerUnavailable(f"Redis at {self._shown_url} is {version}: embedctl needs 6.2 or newer")
        policy = info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory") and policy != "noeviction":
            raise BrokerUnavailable(
                f"Redis at {self._shown_url} evicts keys when it is full (maxmemory-policy {policy}) and would forget "
                "texts and vectors: set maxmemory-policy noeviction"
            )

    def server(self) -> tuple[dict[str, Any], dict[str, str]]:
        """INFO and CONFIG of the server; no CONFIG where this user may not ask for it."""
        with self.client() as client:
            info = client.info()
            try:
                config = client.config_get("*")
            except redis.exceptions.ResponseError:  # not allowed, or renamed away by a provider
                config = {}
        return info, {_text(name): _text(value) for name, value in config.items()}

    def close(self) -> None:
        """Close the pool's idle connections."""
        self._redis.close()


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@cache
def script_source(name: str) -> str:
    """The text of a script: what it shares with others and its constants, then the script."""
    folder = files("embedctl.store")
    own = folder.joinpath(f"{name}.lua").read_text(encoding="utf-8")
    if name == "create":
        return own
    constants = (
        f"local WIRE_VERSION, CHUNK_TTL_FACTOR, EVENTS_KEPT, ROWS_AT, BIRTH, JOBS, WORKERS, DIED, LEFT = "
        f"{wire.VERSION}, {keys.CHUNK_TTL_FACTOR}, {keys.EVENTS_KEPT}, {wire.ROWS_AT}, '{keys.BIRTH}', '{keys.JOBS}', "
        f"'{keys.WORKERS}', '{keys.died('')}', '{keys.LEFT}'\n"
    )
    shared = ("prelude", "deaths") if name == "reap" else ("prelude",)
    return "".join([constants, *(folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in shared), own])


def without_password(url: str) -> str:
    """A URL that may be shown and logged: no password and no query. One that can be read in two ways is not shown."""
    scheme, mark, rest = url.partition("://")
    before, at, location = rest.rpartition("@")
    if at and not _SEPARATORS.isdisjoint(before):
        return f"{scheme}{mark}***"
    location = location.partition("?")[0].partition("#")[0]
    user, colon, _ = before.partition(":")
    hidden = ":***" if user and colon else "***" if colon else ""
    return f"{scheme}{mark}{user}{hidden}{at}{location}"
