"""A Redis whose master is named by sentinels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from embedctl_config.redis_url import Sentinels


@dataclass(frozen=True, slots=True)
class Seen:
    """What sentinels say.

    Attributes:
        answering: how many of those asked answer and know the master's name.
        refusing: how many refuse the password, or ask for one.
        master: its address; empty if none of them knows one.
        replicas: how many it has, as the sentinel says that knows most.
    """

    answering: int
    refusing: int
    asked: int
    master: str
    replicas: int


def client_of(form: type[redis.Redis], url: str, sentinels: Sentinels | None, **options: Any) -> redis.Redis:
    """A client for a URL in redis-py's form, or for the master that sentinels name, which each new connection asks.

    The options are those of each connection to the instance. Raises ValueError if the URL can't be read.
    """
    if sentinels is None:
        return form.from_url(url, **options)
    found = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
    named = {name: found[name] for name in ("username", "password", "db") if name in found}
    if url.startswith("rediss:"):
        named["ssl"] = True
    manager = Sentinel(  # type: ignore[no-untyped-call]
        sentinels.addresses, sentinel_kwargs=_asked_once(sentinels), **named, **options
    )
    client: redis.Redis = manager.master_for(sentinels.master, redis_class=form)  # type: ignore[no-untyped-call]
    return client


def ask(sentinels: Sentinels) -> Seen:
    """Ask each sentinel for its master."""
    answers = [_state(sentinels, host, port) for host, port in sentinels.addresses]
    states = [answer for answer in answers if isinstance(answer, Mapping)]
    refusing = sum(isinstance(answer, redis.exceptions.AuthenticationError) for answer in answers)
    masters = [f"{state['ip']}:{state['port']}" for state in states if state["is_master"]]
    replicas = max((int(state["num-slaves"]) for state in states), default=0)
    return Seen(len(states), refusing, len(sentinels.addresses), masters[0] if masters else "", replicas)


def refuse(error: Exception) -> bool:
    """Whether no master was found because sentinels refuse the password, or ask for one."""
    return isinstance(error, MasterNotFoundError) and "AuthenticationError" in str(error)


def _state(sentinels: Sentinels, host: str, port: int) -> Mapping[str, Any] | redis.exceptions.RedisError | None:
    """What one sentinel says of the master, or why it does not; None if it does not know the master."""
    try:
        with redis.Redis(host, port, **_asked_once(sentinels)) as sentinel:
            found: Mapping[str, Any] | None = sentinel.sentinel_masters().get(sentinels.master)
            return found
    except redis.exceptions.RedisError as error:
        return error


def _asked_once(sentinels: Sentinels) -> dict[str, Any]:
    """The arguments for connections to sentinels: if one does not answer, another one is asked instead."""
    return {"retry": Retry(NoBackoff(), 0), **sentinels.options}
