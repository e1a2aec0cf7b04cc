"""The steps of `POST /v1/jobs/{id}/steps/{step}`."""

from __future__ import annotations

from collections.abc import Mapping

#: The steps that callers take with a job, and what each needs to be told.
STEPS: Mapping[str, tuple[str, ...]] = {
    "hold": ("token", "lease_s"),
    "seal": ("chunks",),
    "resume": ("token",),
    "stop": (),
    "cancel": (),
    "retry": ("chunk", "new_chunk", "token"),
    "failed_chunks": ("start", "count"),
    "chunks_with_errors": ("start", "count"),
    "retried_as": ("chunk",),
    "has_result": ("chunk",),
    "drain": ("token", "machine", "process", "host", "high_water", "place", "dead", "lease_s"),
    "drain_state": (),
    "note_drained": ("token", "name", "facts", "result_bytes", "digests", "more"),
    "free_drained": ("numbers",),
    "is_drained": ("chunk",),
    "drained_map": ("start",),
    "drained_facts": ("names",),
}
#: Those that change nothing.
READING_STEPS = (
    *("failed_chunks", "chunks_with_errors", "retried_as", "has_result"),
    *("drain_state", "is_drained", "drained_map", "drained_facts"),
)
