"""The connection to Redis: time-outs, retries, scripts, and errors that say what to do."""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from embedctl.store.observed import Observer, observed
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable, NotPermitted, SettingsError
from embedctl_config.redis_url import secret_url, tls_options
from embedctl_config.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The oldest Redis whose commands the scripts use.
OLDEST_REDIS = (6, 2)
#: Longest blocking read in ms: well under the socket's time-out.
MAX_BLOCK_MS = 5000
#: How long a Redis that says nothing is waited for, each time that it is asked (seconds).
_SOCKET_TIMEOUT_S = 10
#: Most that is given to a socket at once (bytes).
_PIECE_BYTES = 256 * 1024
#: Connections that nobody has used for this long are not trusted: what stands between may have forgotten them without a
#: word, and the next question would wait for the socket's time-out (seconds).
STALE_S = 60.0
#: What Redis 6.2 and 7 say where a script asks for what the access list denies; redis-py tells it from no other error.
_REFUSED_IN_SCRIPT = re.compile("The user executing the script|ACL failure in script")
#: An ended job of no more chunks gets the lives of its TTL at once, without the reaper.
_SETTLED_AT_ONCE = 16
#: What some scripts share besides the prelude.
_SHARED_BY = {"reap": ("deaths", "rest"), "add": ("repair",)}
#: What :meth:`Connection.explained` knows. All else is a fault of ours.
_EXPLAINED = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.ResponseError)
#: What an instance says that can't answer now: another may be behind its name soon, and the same one ready. Within a
#: script's error the code stands in the middle.
_NOT_NOW = re.compile(
    r"(?:^|[\s-])(?:READONLY|MASTERDOWN|UNBLOCKED|LOADING|NOREPLICAS|NOMASTERLINK|MISCONF|BUSY|TRYAGAIN)\b"
)
_NOT_NOW_CLASSES = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError, redis.exceptions.TryAgainError)
#: What only a cluster says. redis-py leaves the codes out of the errors that it knows.
_CLUSTER = re.compile("CROSSSLOT|CLUSTERDOWN|non local key in a cluster|accessing a non local key|access keys .* slot")
_CLUSTER_CLASSES = (
    redis.exceptions.ClusterCrossSlotError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.AskError,
)
#: What redis-py puts before the error of a command of a pipeline, with the command's arguments.
_IN_PIPELINE = "of pipeline caused error: "
#: What ends the part of a URL in which a password may stand.
_SEPARATORS = frozenset("/?#")


#: By when what is asked here is to be answered, by the monotonic clock; None where that may take what it takes.
_answers_by: ContextVar[float | None] = ContextVar("answers_by", default=None)
#: Whether this is a part of something that is tried again as a whole.
_is_retried: ContextVar[bool] = ContextVar("is_retried", default=False)


@contextmanager
def answers_by(deadline: float | None) -> Iterator[None]:
    """Within this, nothing is tried again after the deadline (monotonic clock).

    A Redis that says nothing so holds up nobody for longer than a socket's time-out after it.
    """
    token = _answers_by.set(deadline)
    try:
        yield
    finally:
        _answers_by.reset(token)


class _BoundedRetry(Retry):
    """Retries until the deadline of :func:`answers_by`, and no part of what is retried as a whole.

    redis-py retries a command, for each try the making of its connection, and within that the connection's check.
    """

    def call_with_retry(self, do: Callable[[], T], fail: Callable[..., Any], *args: Any, **options: Any) -> T:
        within, deadline = _is_retried.get(), _answers_by.get()

        def failed(error: Exception, *count: int) -> None:
            fail(error, *count)
            if within or (deadline is not None and time.monotonic() >= deadline):
                raise error

        token = _is_retried.set(True)
        try:
            return super().call_with_retry(do, failed, *args, **options)
        finally:
            _is_retried.reset(token)


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One of many scripts that are run in one round trip."""

    name: str
    keys: Sequence[str]
    args: Sequence[Any] = ()


class Connection:
    """A pool of connections to the Redis of these settings. Safe to share between threads.

    Args:
        observer: is told of every round trip.

    Raises:
        SettingsError: no Redis is configured; its URL, its password's file or its certificates can't be read; or the
            URL turns off a check of certificates.
    """

    def __init__(self, settings: Settings, observer: Observer | None = None) -> None:
        self._settings = settings
        self._observer = observer
        self._shown_url = without_password(settings.redis_url)
        self._ahead_ms: int | None = None
        self._used = time.monotonic()
        self._open()

    def _open(self) -> None:
        """Begin with a pool that has no connection yet."""
        settings = self._settings
        url, tls = secret_url(settings), tls_options(settings)
        names: dict[str, str] = {}
        client = redis.Redis if self._observer is None else observed(self._observer, names)
        if tls and settings.insecure:
            log.warning(
                "the certificate of Redis at %s is not checked (insecure): anybody on the way may read and change "
                "everything",
                self._shown_url,
            )
        try:
            opened = client.from_url(
                url,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=3,
                **({} if url.startswith("unix:") else {"socket_keepalive": True}),
                health_check_interval=10,
                retry=_BoundedRetry(ExponentialBackoff(cap=1, base=0.05), 3),
                retry_on_error=[redis.exceptions.ReadOnlyError],
                **tls,
            )
        except ValueError:
            # Neither the URL nor the reason is shown: what can't be told apart may be a password.
            raise SettingsError("redis_url can't be read as redis://[user:password@]host[:port][/database]") from None
        pool = opened.connection_pool
        pool.connection_class = type("Patient", (_InPieces, pool.connection_class), {})
        if settings.redis_password_file:
            arguments = opened.connection_pool.connection_kwargs
            for name in ("username", "password"):
                arguments.pop(name, None)
            arguments["credential_provider"] = _PasswordFile(settings)
        self._scripts: dict[str, Any] = {}
        self._script_names = names
        self._redis = opened
        self._process = os.getpid()

    @contextmanager
    def client(self) -> Iterator[Any]:
        """The redis-py client; its errors leave as :class:`BrokerUnavailable`, or what that is the root of.

        Typed Any: redis-py's own return types are unions of its sync and async forms.
        """
        if self._process != os.getpid():
            # A child: the sockets are its parent's, and a lock may have been another thread's as it was made.
            self._open()
        before, self._used = self._used, time.monotonic()
        if self._used - before > STALE_S:
            self.close()
        try:
            yield self._redis
        except _EXPLAINED as error:
            raise self.explained(error) from error

    def explained(self, error: Exception) -> BrokerUnavailable | NotPermitted:
        """An error of redis-py's as one of ours."""
        if isinstance(error, redis.exceptions.AuthenticationError):
            return BrokerUnavailable(f"Redis at {self._shown_url} refuses the user or the password: {error}")
        # Raised inside a script, redis-py does not know it.
        if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
            return BrokerFull(
                f"Redis at {self._shown_url} is full: `embedctl list` and `embedctl discard` old jobs, or raise "
                "its maxmemory"
            )
        if isinstance(error, redis.exceptions.NoPermissionError) or _REFUSED_IN_SCRIPT.search(str(error)):
            return NotPermitted(
                f"Redis at {self._shown_url} does not let its user do this: {error}. docs/security.md says which user "
                "may; `embedctl config acl` makes the access list"
            )
        if isinstance(error, redis.exceptions.ResponseError):
            return self._refused(error)
        if distrust := _distrust(error):
            return BrokerUnavailable(
                f"Redis at {self._shown_url} is not to be trusted: {distrust}. Name the certificate of who signed "
                "its own in tls_ca_file, and in redis_url the host that stands in its own"
            )
        reason = str(error).rstrip(".")
        return BrokerUnavailable(
            f"Redis at {self._shown_url} can't be reached: {reason}. Does it run, and is EMBEDCTL_REDIS_URL right?"
        )

    def _refused(self, error: redis.exceptions.ResponseError) -> BrokerUnavailable:
        reason = _reason(error)
        if not isinstance(error, redis.exceptions.MasterDownError) and (
            isinstance(error, _CLUSTER_CLASSES) or _CLUSTER.search(reason)
        ):
            return self._is_cluster(reason)
        if _is_not_now(error):
            self.close()  # the next connection looks the name up anew; who uses one at this moment is told the same
            return BrokerUnavailable(
                f"Redis at {self._shown_url} does not do this now: {reason}. Does EMBEDCTL_REDIS_URL name the master?"
            )
        return BrokerRefused(
            f"Redis at {self._shown_url} refuses a command, and would each time: {reason}. Has something else "
            "written its keys? docs/troubleshooting.md says more"
        )

    def _is_cluster(self, reason: str) -> BrokerRefused:
        return BrokerRefused(
            f"Redis at {self._shown_url} is a cluster ({reason}), which keeps the keys of a job apart: use an instance "
            "without cluster mode (cluster-enabled no)"
        )

    def script(self, name: str, script_keys: Sequence[str], args: Sequence[Any] = ()) -> tuple[str, list[Any]]:
        """Run a script: its answer and what came with it."""
        with self.client():
            script = self._script(name)
            try:
                answer, *rest = script(keys=script_keys, args=args)
            except redis.exceptions.ResponseError as error:
                if not _is_not_now(error):
                    raise
                # Its first write was refused, so it wrote nothing; and another may be the master by now.
                self.close()
                answer, *rest = script(keys=script_keys, args=args)
        return answer.decode(), rest

    def read_scripts(self) -> None:
        """Read every script now, for a process that may have no file descriptor left when it needs one."""
        shared = {"prelude", *(part for parts in _SHARED_BY.values() for part in parts)}
        names = {Path(file.name) for file in files("embedctl.store").iterdir()}
        for name in sorted(name.stem for name in names if name.suffix == ".lua" and name.stem not in shared):
            self._script(name)

    def scripts(self, calls: Sequence[ScriptCall]) -> list[tuple[str, list[Any]] | BrokerRefused]:
        """Run many scripts in one round trip: what each answered and what came with it, or why Redis refused it.

        Raises:
            BrokerUnavailable: Redis can't be reached, is full, or refuses whatever it is asked for.
        """
        answers = self._run_scripts(calls)
        unknown = [at for at, answer in enumerate(answers) if isinstance(answer, redis.exceptions.NoScriptError)]
        if unknown:
            with self.client() as client:
                for name in {calls[at].name for at in unknown}:
                    client.script_load(self._script(name).script)
            for at, answer in zip(unknown, self._run_scripts([calls[at] for at in unknown]), strict=True):
                answers[at] = answer
        return [self.answer_of(answer) for answer in answers]

    def answer_of(self, answer: Any) -> Any:
        """One answer of a pipeline that raises no error of Redis': itself, or why Redis refused the command.

        Raises:
            BrokerUnavailable: it was refused for no reason of its own.
        """
        if not isinstance(answer, Exception):
            return answer
        try:
            with self.client():
                raise answer
        except BrokerRefused as refused:
            return refused

    def _run_scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        with self.client() as client:
            pipe = client.pipeline(transaction=False)
            for call in calls:
                pipe.evalsha(self._script(call.name).sha, len(call.keys), *call.keys, *call.args)
            answers = pipe.execute(raise_on_error=False)
        return [(answer[0].decode(), answer[1:]) if isinstance(answer, list) else answer for answer in answers]

    def _script(self, name: str) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._redis.register_script(script_source(name))
            self._script_names[script.sha] = name
        return script

    def now_ms(self) -> int:
        """Redis' clock."""
        with self.client() as client:
            seconds, micros = client.time()
        now = int(seconds) * 1000 + int(micros) // 1000
        self._ahead_ms = now - time.time_ns() // 1_000_000
        return now

    def about_now_ms(self) -> int:
        """Redis' clock by this host's and what :meth:`now_ms` last told: for people to read, never to decide by."""
        if self._ahead_ms is None:
            return self.now_ms()
        return time.time_ns() // 1_000_000 + self._ahead_ms

    def uptime_s(self) -> int:
        """Whole seconds since Redis started."""
        with self.client() as client:
            return int(client.info("server")["uptime_in_seconds"])

    def is_full(self) -> bool:
        """Whether Redis has reached its maxmemory, so that it takes nothing more."""
        with self.client() as client:
            memory = client.info("memory")
        return bool(memory.get("maxmemory")) and memory["used_memory"] >= memory["maxmemory"]

    def check_server(self) -> None:
        """Refuse a Redis that can't keep jobs.

        Raises:
            BrokerUnavailable: it is too old, or may evict keys; BrokerRefused where it is a cluster.
        """
        with self.client() as client:
            info = {**client.info("server"), **client.info("memory")}
        if info.get("redis_mode") == "cluster":
            raise self._is_cluster("redis_mode cluster")
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
        """Close the connections that no thread uses at this moment; whoever asks next opens another."""
        if self._process == os.getpid():
            self._redis.connection_pool.disconnect(inuse_connections=False)


class _InPieces:
    """For redis-py's connections: sends what is large in pieces, each with the whole of the socket's time-out.

    Python bounds all of a `sendall` by it, so that a large value could never be sent over a slow network. Reading is
    bounded piece by piece as it is.
    """

    def pack_command(self, *args: Any) -> list[Any]:
        return _pieces(super().pack_command(*args))  # type: ignore[misc]  # of the class that this is mixed into

    def pack_commands(self, commands: Any) -> list[Any]:
        return _pieces(super().pack_commands(commands))  # type: ignore[misc]


def _pieces(packed: Iterable[Any]) -> list[Any]:
    pieces: list[Any] = []
    for each in packed:
        if len(each) <= _PIECE_BYTES:
            pieces.append(each)
        else:
            view = memoryview(each)
            pieces += [view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES)]
    return pieces


class _PasswordFile(redis.credentials.CredentialProvider):
    """The user, and the password as its file holds it when a connection is made: it may be changed meanwhile."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            found = redis.connection.parse_url(secret_url(self._settings))  # type: ignore[no-untyped-call]
        except SettingsError as error:  # redis-py would take any other error for a connection that is made
            raise redis.exceptions.AuthenticationError(str(error)) from error
        password = str(found["password"])
        return (str(found["username"]), password) if "username" in found else (password,)


def _reason(error: Exception) -> str:
    """What Redis says, without what redis-py puts before it."""
    return str(error).rpartition(_IN_PIPELINE)[2].rstrip(".")


def _is_not_now(error: redis.exceptions.ResponseError) -> bool:
    return isinstance(error, _NOT_NOW_CLASSES) or _NOT_NOW.search(_reason(error)) is not None


def _distrust(error: BaseException | None) -> str:
    """What is wrong with the certificate that an error came of; empty if it came of something else."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message.rstrip(".")
        error = error.__cause__ or error.__context__
    return ""


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
        f"local WIRE_VERSION, CHUNK_TTL_FACTOR, UNENDED_TTL_MS, SETTLED_AT_ONCE = "
        f"{wire.VERSION}, {keys.CHUNK_TTL_FACTOR}, {keys.UNENDED_TTL_S * 1000}, {_SETTLED_AT_ONCE}\n"
        f"local EVENTS_KEPT, ENDED_EVENTS_MS, ROWS_AT, DIGEST_FROM, DIGEST_TO = "
        f"{keys.EVENTS_KEPT}, {keys.ENDED_EVENTS_S * 1000}, {wire.ROWS_AT}, {', '.join(map(str, wire.DIGEST_RANGE))}\n"
        f"local BIRTH, JOBS, WORKERS, DIED, LEFT = "
        f"'{keys.BIRTH}', '{keys.JOBS}', '{keys.WORKERS}', '{keys.died('')}', '{keys.LEFT}'\n"
        f"local UPKEEP, LOOK_AFTER_MS = '{keys.upkeep('')}', {keys.LOOK_AFTER_S * 1000}\n"
    )
    parts = ["prelude", *_SHARED_BY.get(name, ())]
    return "".join([constants, *(folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in parts), own])


def without_password(url: str) -> str:
    """A URL that may be shown and logged: no password and no query. One that can be read in two ways is not shown."""
    scheme, mark, rest = url.partition("://")
    if url and not mark:
        return "***"
    before, at, location = rest.rpartition("@")
    if at and not _SEPARATORS.isdisjoint(before):
        return f"{scheme}{mark}***"
    location = location.partition("?")[0].partition("#")[0]
    user, colon, _ = before.partition(":")
    hidden = ":***" if user and colon else "***" if colon else ""
    return f"{scheme}{mark}{user}{hidden}{at}{location}"
