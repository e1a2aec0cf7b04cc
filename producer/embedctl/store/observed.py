"""A redis-py client that tells how long Redis took to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
from redis.client import Pipeline

#: Is told of every round trip: the command's name, `PIPELINE`, or a script's name; seconds, with all that redis-py does
#: to get an answer; and whether there was one. It is called by whichever thread asked, and must not raise.
Observer = Callable[[str, float, bool], None]


def observed(observer: Observer, script_names: Mapping[str, str]) -> type[redis.Redis]:
    """A kind of redis-py client whose round trips an observer is told of.

    Args:
        script_names: by the sha1 of the script; read at each call, so that names may be added later.
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
            answers: list[Any] = timed("PIPELINE", lambda: execute(raise_on_error))
            return answers

    class ObservedRedis(redis.Redis):
        def execute_command(self, *args: Any, **options: Any) -> Any:
            execute = super().execute_command
            name = script_names.get(args[1], args[0]) if args[0] == "EVALSHA" else args[0]
            return timed(name, lambda: execute(*args, **options))  # type: ignore[no-untyped-call]  # redis-py's has no types

        def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
            return ObservedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    return ObservedRedis
