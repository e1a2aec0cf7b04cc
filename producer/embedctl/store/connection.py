"""The connection to Redis: timeouts, retries and round trips."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import redis
from redis.backoff import ExponentialBackoff
from redis.client import Pipeline
from redis.retry import Retry
from redis.utils import str_if_bytes

from embedctl.store.refusals import NO_HANDSHAKE, all_said, explained, is_cluster, is_full, is_not_now
from embedctl.store.scripts import ScriptCall, script_source
from embedctl.store.sentinels import client_of
from embedctl_config.errors import BrokerRefused, BrokerUnavailable, NotPermitted, SettingsError
from embedctl_config.redis_url import secret_url, sentinels_of, tls_options
from embedctl_config.settings import Settings

#: Called after every round trip with three arguments: the name of the command or the script, or `PIPELINE` for a
#: pipeline without scripts or with several kinds of them; the duration in seconds, including redis-py's retries; and
#: whether Redis answered. It runs in the thread that made the call, and must not raise.
Observer = Callable[[str, float, bool], None]
log = logging.getLogger(__name__)

T = TypeVar("T")
#: Adds commands to a pipeline.
Adds = Callable[[Any], object]

#: The oldest Redis whose commands the scripts use.
OLDEST_REDIS = (6, 2)
#: Longest blocking read in ms: well below the socket timeout.
MAX_BLOCK_MS = 5000
#: How long each command waits for an answer of Redis (seconds).
_SOCKET_TIMEOUT_S = 10
#: Largest piece that is passed to a socket at once (bytes).
_PIECE_BYTES = 256 * 1024
#: Connections that were idle for this long are not used again (seconds). A firewall in between may have dropped them
#: silently, and the next command would then wait for the socket timeout.
STALE_S = 60.0
#: What was learned of a server, its version, its policy and its clock, counts for this long (seconds).
_KNOWN_S = 10.0
#: The errors that :meth:`Connection.explained` explains. Any other error is a bug of ours.
_EXPLAINED = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ResponseError,
    redis.exceptions.InvalidResponse,
)
#: Characters that end the user and password part of a URL.
_SEPARATORS = frozenset("/?#")


#: The deadline for answers, by the monotonic clock; None for no deadline.
_answers_by: ContextVar[float | None] = ContextVar("answers_by", default=None)
#: Whether this call is part of a call that is retried as a whole.
_is_retried: ContextVar[bool] = ContextVar("is_retried", default=False)


def observed(observer: Observer, script_names: Mapping[str, str]) -> type[redis.Redis]:
    """A class of redis-py clients that call an observer after each round trip.

    The names of scripts, by their sha1, are read at each call: names may be added later.
    """

    def timed(name: str, ask: Callable[[], Any]) -> Any:
        answered = True
        began = time.perf_counter()
        try:
            return ask()
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            answered = False
            raise
        finally:
            observer(name, time.perf_counter() - began, answered)

    class ObservedPipeline(Pipeline):
        def execute(self, raise_on_error: bool = True) -> list[Any]:
            execute = super().execute
            scripts = {script_names.get(args[1]) for args, _ in self.command_stack if args[0] == "EVALSHA"}
            name = (scripts.pop() if len(scripts) == 1 else None) or "PIPELINE"
            answers: list[Any] = timed(name, lambda: execute(raise_on_error))
            return answers

    class ObservedRedis(redis.Redis):
        def execute_command(self, *args: Any, **options: Any) -> Any:
            execute = super().execute_command
            name = script_names.get(args[1], args[0]) if args[0] == "EVALSHA" else args[0]
            return timed(name, lambda: execute(*args, **options))  # type: ignore[no-untyped-call]  # redis-py's has no types

        def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
            return ObservedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    return ObservedRedis


@contextmanager
def answers_by(deadline: float | None) -> Iterator[None]:
    """Inside this context, no command is retried after the deadline (monotonic clock).

    So a Redis that hangs delays the caller by at most one socket timeout after the deadline.
    """
    token = _answers_by.set(deadline)
    try:
        yield
    finally:
        _answers_by.reset(token)


#: A thread that waits holds one connection. redis-py's own limit is 100, and it raises at the next one.
_MOST_CONNECTIONS = 10_000


class _BoundedRetry(Retry):
    """Retries only the outermost call, and only until the deadline of :func:`answers_by`.

    redis-py would also retry inside each attempt: making the connection, and inside that, checking it. A port without
    TLS does not answer a handshake at all, so a handshake that took a whole socket timeout is not tried again.
    """

    def call_with_retry(self, do: Callable[[], T], fail: Callable[..., Any], *args: Any, **options: Any) -> T:
        within, deadline = _is_retried.get(), _answers_by.get()

        def failed(error: Exception, *count: int) -> None:
            fail(error, *count)
            over = deadline is not None and time.monotonic() >= deadline
            if within or over or NO_HANDSHAKE in all_said(error):
                raise error

        token = _is_retried.set(True)
        try:
            return super().call_with_retry(do, failed, *args, **options)
        finally:
            _is_retried.reset(token)


class Connection:
    """A pool of connections to the Redis of these settings. Safe to share between threads.

    Raises SettingsError if no Redis is configured; if its URL, its password's file or its certificates can't be read;
    or if the URL turns off a check of certificates.
    """

    def __init__(self, settings: Settings, observer: Observer | None = None) -> None:
        self._settings = settings
        self._observer = observer
        self._shown_url = without_password(settings.redis_url)
        self._ahead_ms: int | None = None
        self._time_asked: tuple[float, int] | None = None
        self._checked: float | None = None
        self._maxmemory: tuple[float, int] | None = None  # when it was asked for, and what it was
        self._used = time.monotonic()
        self._has_answered = False
        self._open()

    def _open(self) -> None:
        """Make a new pool without connections."""
        settings = self._settings
        url, tls = secret_url(settings), tls_options(settings)
        names: dict[str, str] = {}
        client = redis.Redis if self._observer is None else observed(self._observer, names)
        if tls and settings.insecure:
            log.warning(
                "the certificate of Redis at %s is not checked (insecure): anyone on the network path can read and "
                "change everything",
                self._shown_url,
            )
        try:
            opened = client_of(
                client,
                url,
                sentinels_of(settings),
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=3,
                **({} if url.startswith("unix:") else {"socket_keepalive": True}),
                health_check_interval=10,
                max_connections=_MOST_CONNECTIONS,
                # Only within a command, to reconnect. Whoever asks again does so by embedctl_config.retry.
                retry=_BoundedRetry(ExponentialBackoff(cap=1, base=0.05), 3),
                retry_on_error=[redis.exceptions.ReadOnlyError],
                **tls,
            )
        except ValueError:
            # Show neither the URL nor the reason: a part that can't be parsed may be a password.
            raise SettingsError("redis_url can't be read as redis://[user:password@]host[:port][/database]") from None
        pool = opened.connection_pool
        pool.connection_class = type("InPieces", (_InPieces, pool.connection_class), {})
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
        """The redis-py client. Its errors are raised as those of :meth:`explained`.

        Typed Any: redis-py's own return types are unions of its sync and async forms.
        """
        if self._process != os.getpid():
            # A forked child: the sockets belong to its parent, and another thread may have held a lock at the fork.
            self._open()
        before, self._used = self._used, time.monotonic()
        if self._used - before > STALE_S:
            self.close()
        try:
            yield self._redis
            self._has_answered = True
        except _EXPLAINED as error:
            raise self.explained(error) from error

    def explained(self, error: Exception) -> BrokerUnavailable | NotPermitted:
        """One of our errors for an error of redis-py."""
        if is_not_now(error):
            self.close()  # the next connection resolves the name again; connections in use get the same error
        limit = 0
        if is_full(error):
            with suppress(BrokerUnavailable):
                limit = self.maxmemory()
        return explained(error, self._shown_url, has_answered=self._has_answered, maxmemory=limit)

    def script(self, name: str, script_keys: Sequence[str], args: Sequence[Any] = ()) -> tuple[str, list[Any]]:
        """Run a script; returns its answer and the rest of its reply."""
        with self.client():
            script = self._script(name)
            try:
                answer, *rest = script(keys=script_keys, args=args)
            except redis.exceptions.ResponseError as error:
                if not is_not_now(error):
                    raise
                # Redis refused the script's first write, so nothing was written. Another instance may be master by now.
                self.close()
                answer, *rest = script(keys=script_keys, args=args)
        return answer.decode(), rest

    def scripts(self, calls: Sequence[ScriptCall]) -> list[tuple[str, list[Any]] | BrokerRefused]:
        """Run many scripts in one round trip: the answer and the rest of each reply, or why Redis refused it."""
        return [self.answer_of(answer) for answer in self.raw_scripts(calls)]

    def raw_scripts(
        self, calls: Sequence[ScriptCall], *, put: Adds | None = None, ask: Adds | None = None
    ) -> list[Any]:
        """The same, with the errors of redis-py among the answers: :meth:`answer_of` tells what they mean.

        Args:
            put: adds the command that stores a value before the first script runs.
            ask: adds commands to be run after the scripts; their answers come last.

        Raises BrokerUnavailable also if the value can't be stored; the scripts may have run.
        """
        answers = self._run_scripts(calls, put, ask)
        unknown = [at for at, answer in enumerate(answers) if isinstance(answer, redis.exceptions.NoScriptError)]
        if unknown:
            with self.client() as client:
                for name in {calls[at].name for at in unknown}:
                    client.script_load(self._script(name).script)
            for at, answer in zip(unknown, self._run_scripts([calls[at] for at in unknown]), strict=True):
                answers[at] = answer
        return answers

    def answer_of(self, answer: Any) -> Any:
        """An answer of a pipeline that runs without raising errors: the answer, or why Redis refused the command.

        Raises BrokerUnavailable if it refused for a reason that applies to every command.
        """
        if not isinstance(answer, Exception):
            return answer
        try:
            with self.client():
                raise answer
        except BrokerRefused as refused:
            return refused

    def ask_each(self, things: Iterable[T], ask: Callable[[Any, T], object], *, refusals: bool = False) -> list[Any]:
        """The answers to the commands that `ask` adds to a pipeline for each of these things, in one round trip.

        Args:
            refusals: whether the reason why Redis refused a command takes the place of its answer, as by
                :meth:`answer_of`; otherwise the first one is raised.
        """
        with self.client() as client:
            pipe = client.pipeline(transaction=False)
            for thing in things:
                ask(pipe, thing)
            answers: list[Any] = pipe.execute(raise_on_error=not refusals)
        return [self.answer_of(answer) for answer in answers] if refusals else answers

    def _run_scripts(self, calls: Sequence[ScriptCall], put: Adds | None = None, ask: Adds | None = None) -> list[Any]:
        with self.client() as client:
            pipe = client.pipeline(transaction=False)
            if put is not None:
                put(pipe)
            for call in calls:
                pipe.evalsha(self._script(call.name).sha, len(call.keys), *call.keys, *call.args)
            if ask is not None:
                ask(pipe)
            answers = pipe.execute(raise_on_error=False)
        if put is not None and isinstance(stored := self.answer_of(answers.pop(0)), BrokerRefused):
            raise stored
        ran, asked = answers[: len(calls)], answers[len(calls) :]
        return [*((each[0].decode(), each[1:]) if isinstance(each, list) else each for each in ran), *asked]

    def _script(self, name: str) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._redis.register_script(script_source(name))
            self._script_names[script.sha] = name
        return script

    def now_ms(self) -> int:
        """The time by Redis' clock, in ms since 1970."""
        with self.client() as client:
            seconds, micros = client.time()
        now = int(seconds) * 1000 + int(micros) // 1000
        self._ahead_ms = now - time.time_ns() // 1_000_000
        self._time_asked = time.monotonic(), now
        return now

    def recent_now_ms(self) -> int:
        """The same, reckoned from an answer that is a few seconds old at most, and without this host's wall clock."""
        if self._time_asked is None:
            return self.now_ms()
        asked, then_ms = self._time_asked
        passed_s = time.monotonic() - asked
        return then_ms + int(passed_s * 1000) if passed_s < _KNOWN_S else self.now_ms()

    def about_now_ms(self) -> int:
        """An estimate of :meth:`now_ms` from this host's clock and the last difference. Use it only for display."""
        if self._ahead_ms is None:
            return self.now_ms()
        return time.time_ns() // 1_000_000 + self._ahead_ms

    def uptime_s(self) -> int:
        """Whole seconds since Redis started."""
        with self.client() as client:
            return int(client.info("server")["uptime_in_seconds"])

    def is_full(self) -> bool:
        """Whether Redis has reached its maxmemory, and so refuses writes."""
        return self.full_bytes() is not None

    def full_bytes(self) -> tuple[int, int] | None:
        """What a full Redis uses, and its maxmemory, both in bytes; None if there is room."""
        used, most = self.memory_bytes()
        return (used, most) if 0 < most <= used else None

    def memory_bytes(self) -> tuple[int, int]:
        """What Redis uses, and its maxmemory, both in bytes; 0 if it has none."""
        with self.client() as client:
            memory = client.info("memory")
        return int(memory["used_memory"]), int(memory.get("maxmemory", 0))

    def maxmemory(self) -> int:
        """Redis' limit on its memory in bytes, a few seconds ago at most; 0 if it has none."""
        known, now = self._maxmemory, time.monotonic()
        if known is None or now - known[0] >= _KNOWN_S:
            known = self._maxmemory = (now, self.memory_bytes()[1])
        return known[1]

    def check_server(self) -> None:
        """Raise BrokerUnavailable if this Redis can't keep jobs: it is too old, may evict keys, or is a cluster.

        One that could a few seconds ago is not asked again.
        """
        if self._checked is not None and time.monotonic() - self._checked < _KNOWN_S:
            return
        with self.client() as client:
            info = {**client.info("server"), **client.info("memory")}
        self._maxmemory = (time.monotonic(), int(info.get("maxmemory", 0)))
        if mode_of(info) == "cluster":
            raise is_cluster(self._shown_url, "its mode is cluster")
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
            raise BrokerUnavailable(f"Redis at {self._shown_url} is {version}: embedctl needs 6.2 or newer")
        policy = info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory") and policy != "noeviction":
            raise BrokerUnavailable(
                f"Redis at {self._shown_url} evicts keys when it is full (maxmemory-policy {policy}) and would forget "
                "texts and vectors: set maxmemory-policy noeviction"
            )
        self._checked = time.monotonic()

    def server(self) -> tuple[dict[str, Any], dict[str, str]]:
        """INFO and CONFIG of the server; CONFIG is empty if this user may not read it."""
        with self.client() as client:
            info = client.info()
            try:
                config = client.config_get("*")
            except redis.exceptions.ResponseError:  # not allowed, or renamed away by a provider
                config = {}
        return info, {str_if_bytes(name): str_if_bytes(value) for name, value in config.items()}

    def close(self) -> None:
        """Close the connections that no thread uses at this moment. The next command opens a new one."""
        self._checked = self._time_asked = self._maxmemory = None  # it may lead to another server
        if self._process == os.getpid():
            self._redis.connection_pool.disconnect(inuse_connections=False)


def mode_of(info: Mapping[str, Any]) -> str:
    """The mode that a server's INFO tells: Valkey has its own name for it."""
    return str(info.get("redis_mode") or info.get("server_mode") or "standalone")


class _InPieces:
    """A mixin for redis-py's connections: sends large values in pieces, each with a full socket timeout.

    Python applies the timeout to a whole `sendall`, so a large value could never be sent over a slow network. For
    reading, the timeout applies to each piece already.
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
    """Reads the user and the password file at each new connection, because the password may change."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            found = redis.connection.parse_url(secret_url(self._settings))  # type: ignore[no-untyped-call]
        except SettingsError as error:  # redis-py would ignore any other error, and use the connection
            raise redis.exceptions.AuthenticationError(str(error)) from error
        password = str(found["password"])
        return (str(found["username"]), password) if "username" in found else (password,)


def without_password(url: str) -> str:
    """A URL without password and query, safe to show and log. An ambiguous URL becomes `***`."""
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
