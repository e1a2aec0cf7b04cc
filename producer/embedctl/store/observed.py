"""A redis-py client that reports the duration of its round trips."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
from redis.client import Pipeline

#: Called after every round trip with three arguments: the name of the command or the script, or `PIPELINE` for a
#: pipeline without scripts or with several kinds of them; the duration in seconds, including redis-py's retries; and
#: whether Redis answered. It runs in the thread that made the call, and must not raise.
Observer = Callable[[str, float, bool], None]


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
