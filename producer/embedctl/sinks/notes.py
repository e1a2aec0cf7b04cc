"""Resume points of several jobs in one small note, for databases without transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Jobs whose resume points a note holds. An older one begins again, which changes nothing in the database.
_MOST = 32


def resume_point(note: Mapping[str, Any], job: str, variant: str) -> int:
    """How many chunks of a job are delivered, by a note; 0 if it does not say."""
    found = note.get(job)
    if not isinstance(found, Mapping) or found.get("variant") != variant:
        return 0
    chunks = found.get("chunks")
    return chunks if isinstance(chunks, int) else 0


def noted(note: Mapping[str, Any], job: str, variant: str, chunks: int) -> dict[str, Any]:
    """The note with another resume point; the job that was noted last stands last."""
    others = [(name, value) for name, value in note.items() if name != job]
    return {**dict(others[-(_MOST - 1) :]), job: {"variant": variant, "chunks": chunks}}
