"""A claimed chunk, with what it takes to encode it and to store its result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from embedctl.store import JobStatus
from embedctl_config.wire import ChunkInput
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.serving.in_hand import Held


@dataclass(frozen=True, slots=True)
class ClaimedChunk:
    """A chunk that this worker holds, its input as it is stored, and the same decoded.

    `given_up` are rows at which earlier owners died; None if the chunk is not suspect for that reason.
    """

    held: Held
    job: JobStatus
    encoder: ChunkEncoder
    payload: bytes
    chunk: ChunkInput
    given_up: Collection[int] | None

    @property
    def is_suspect(self) -> bool:
        """Whether workers died or fell sick over it."""
        return self.given_up is not None or (self.held.doubts is not None and self.held.doubts.is_suspect)
