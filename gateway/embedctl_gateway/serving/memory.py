"""Memory that is free goes back to the system. glibc keeps what a burst of requests has left in between, for ever."""

from __future__ import annotations

import asyncio
import ctypes

#: Seconds between two times.
EVERY_S = 10.0


async def keep_small() -> None:
    """Give free memory back, until this is cancelled. Without glibc, nothing is to be done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(EVERY_S)
        await asyncio.to_thread(trim, 0)  # others go on meanwhile
