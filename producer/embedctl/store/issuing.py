"""The script that chooses the chunks whose tickets are to be sent now, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embedctl.store.scripts import ScriptCall
from embedctl_config import keys
from embedctl_config.settings import Settings


@dataclass(frozen=True, slots=True)
class Issued:
    """A chunk whose ticket is to be sent now."""

    job_id: str
    chunk: int


def issue_call(settings: Settings, job_id: str, queue: str, over: int | None = None) -> ScriptCall:
    """The script of :meth:`JobStore.issue`."""
    sizes = [keys.issued(queue, size) for size in ("large", "small")]
    return ScriptCall(
        "issue",
        [keys.queue_workers(queue), keys.lanes(queue), *sizes, keys.background_pause(queue)],
        [
            job_id,
            "" if over is None else over,
            queue,
            settings.limits.window_per_worker,
            int(settings.limits.reissue_s * 1000),
            settings.interactive_share,
        ],
    )


def issued_of(rest: Sequence[Any]) -> list[Issued]:
    """The chunks in an answer of that script."""
    return [Issued(job_id.decode(), int(chunk)) for job_id, chunk in zip(rest[::2], rest[1::2], strict=True)]
