"""A caller's own files and batches, by the ids that the caller gives."""

from __future__ import annotations

from embedctl.listening import in_shared_thread
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import StoredFile
from embedctl_gateway.calls import Call
from embedctl_gateway.objects import is_id, missing

#: What ids begin with.
BATCH, FILE = "batch_", "file-"


async def file_of(call: Call, file_id: str) -> StoredFile | None:
    """A file of the caller's; None if it has no such file."""
    if not is_id(file_id, FILE):
        return None
    return await in_shared_thread(lambda: call.gateway.files.get(file_id, call.tenant))


async def batch_of(call: Call, batch_id: str) -> StoredBatch:
    """A batch of the caller's; raises Refusal if the caller has no such batch."""
    batch = None
    if is_id(batch_id, BATCH):
        batch = await in_shared_thread(lambda: call.gateway.batches.get(batch_id, call.tenant))
    if batch is None:
        raise missing("batch")
    return batch
