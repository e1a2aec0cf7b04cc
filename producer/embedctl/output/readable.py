"""What an output is written of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from embedctl.output.numbers import Numbers
from embedctl.results import ChunkVectors
from embedctl.store import JobStatus


class Readable(Protocol):
    """A job, as far as outputs ask it; the methods are those of :class:`Job`."""

    @property
    def id(self) -> str: ...

    def status(self) -> JobStatus: ...

    def iter_results(
        self, *, start: int = 0, progress: Callable[[JobStatus], None] | None = None
    ) -> Iterator[ChunkVectors]: ...

    def wait_until_sealed(self, progress: Callable[[JobStatus], None] | None = None) -> JobStatus: ...

    def stored_numbers(self) -> Numbers: ...
