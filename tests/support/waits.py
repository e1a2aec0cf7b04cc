"""The calls that wait for a job, with `await` and without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from embedctl import AsyncJob, Job
from embedctl.waiting.results import ChunkVectors


async def _all_of(job: AsyncJob, timeout: Any) -> list[ChunkVectors]:
    return [chunk async for chunk in job.iter_results(timeout=timeout)]


#: Each takes a job and its timeout (seconds).
WAITS: dict[str, Callable[[Job, Any], Any]] = {
    "wait": lambda job, timeout: job.wait(timeout),
    "wait_until_sealed": lambda job, timeout: job.wait_until_sealed(timeout=timeout),
    "iter_results": lambda job, timeout: list(job.iter_results(timeout=timeout)),
    "await wait": lambda job, timeout: asyncio.run(AsyncJob(job).wait(timeout)),
    "await wait_until_sealed": lambda job, timeout: asyncio.run(AsyncJob(job).wait_until_sealed(timeout=timeout)),
    "async for iter_results": lambda job, timeout: asyncio.run(_all_of(AsyncJob(job), timeout)),
}
