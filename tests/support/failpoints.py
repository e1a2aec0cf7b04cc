"""Kills between two steps."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from embedctl import ChunkVectors


class Killed(BaseException):
    """Stands for a kill: nothing is tidied."""


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def dies_at(position: int) -> Callable[[ChunkVectors], None]:
    """What dies when it is told of the chunk that begins at this position."""

    def dies(chunk: ChunkVectors) -> None:
        if chunk.positions[:1].tolist() == [position]:
            raise Killed

    return dies


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, count: int, *, after: bool) -> None:
    """Let the process die before or after the call of this number."""
    real, calls = getattr(owner, name), 0

    def dies(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            raise Killed
        answer = real(*args, **options)
        if calls == count:
            raise Killed
        return answer

    monkeypatch.setattr(owner, name, dies)


@contextmanager
def killed_at(owner: Any, name: str, count: int, *, after: bool) -> Iterator[None]:
    """What runs in the block dies before or after the call of this number. It fails if that did not happen."""
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, owner, name, count, after=after)
        with pytest.raises(Killed):
            yield
