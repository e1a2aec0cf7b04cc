"""Inline jobs: all text is at hand and fits into one small chunk, so one round trip makes the job."""

from __future__ import annotations

from collections.abc import Callable

from embedctl.broker import Broker
from embedctl.chunk_sizes import ReadAhead
from embedctl.chunking import chunks_of
from embedctl.routing import with_chunk_size
from embedctl.store import InlineJob, JobSpec
from embedctl_config import wire

#: An inline job has at most so many records and bytes. A larger one is not held up by a few round trips.
_MOST_RECORDS, _MOST_BYTES = 256, 32 * 1024


def begun_inline(broker: Broker, specify: Callable[[], JobSpec], ahead: ReadAhead, token: str) -> InlineJob | None:
    """Make a job of the records of `ahead`, which stay there; None if they are not one small chunk. The specification
    has no idempotency key. Raises BrokerUnavailable if Redis can't be reached, and may have made the job; or if it is
    full, and has not."""
    records = ahead.whole_within(_MOST_RECORDS, _MOST_BYTES)
    if not records:
        return None
    spec = with_chunk_size(broker.settings, broker.workers, specify(), ahead)
    options = spec.options
    chunk, *others = chunks_of(records, max_rows=options["chunk_size"], max_bytes=options["chunk_bytes"])
    if others or spec.data is not None:
        return None
    payload = wire.encode_input(chunk)
    return broker.jobs.create_inline(spec, payload, digest=wire.digest_of(payload), rows=len(chunk), token=token)
