"""Results that one process has read from Redis, and that leave it together once they are durable elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embedctl.waiting.results import ChunkVectors

#: Most chunks that leave Redis together: it notes all of them in one step.
MOST_CHUNKS = 10_000


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of a chunk, read from Redis.

    Attributes:
        of_corpus: whether the chunks of the corpus came in order up to this one.
        more: the chunks of retried records that are laid over it.
        size: what all these results take in Redis (bytes).
        digest: of the chunk's input.
        made_by: the backend.
    """

    chunk: int
    of_corpus: bool
    vectors: ChunkVectors
    more: tuple[int, ...]
    size: int
    digest: bytes
    made_by: str

    @property
    def weight(self) -> int:
        """About how many bytes it adds to a file."""
        return max(self.size, self.vectors.nbytes)


class Held:
    """Chunks that leave Redis together: consecutive ones of the corpus, or any others.

    Attributes:
        more: chunks of retried records that are laid over them.
        bytes: what all these results take in Redis.
        digests: of the chunks' inputs, one after the other.
    """

    def __init__(self, *, of_corpus: bool) -> None:
        self.of_corpus = of_corpus
        self.chunks: list[int] = []
        self.more: list[int] = []
        self.bytes = 0
        self.digests = bytearray()

    def __iter__(self) -> Iterator[int]:
        """All chunks whose results leave Redis."""
        yield from self.chunks
        yield from self.more

    def has_room_for(self, taken: Taken, *, most_bytes: int) -> bool:
        """Whether a chunk belongs to them, and the results take no more than so many bytes. The first chunk always
        does."""
        if taken.of_corpus is not self.of_corpus:
            return False
        if not self.chunks:
            return True
        follows = taken.chunk == self.chunks[-1] + 1 or not self.of_corpus
        return follows and self.bytes + taken.size <= most_bytes and len(self.chunks) < MOST_CHUNKS

    def add(self, taken: Taken) -> None:
        self.chunks.append(taken.chunk)
        self.more += taken.more
        self.bytes += taken.size
        self.digests += taken.digest

    @property
    def range(self) -> tuple[int, int]:
        """The first and the last chunk of the corpus; (0, -1) if these are others."""
        return (self.chunks[0], self.chunks[-1]) if self.of_corpus else (0, -1)
