"""Memory that is free goes back to the system, and garbage is looked for where it holds up few requests."""

from __future__ import annotations

import asyncio
import ctypes
import gc

#: Seconds between two times.
EVERY_S = 10.0
#: Of Python's collector: objects until it looks at young ones, such looks until it looks at older ones, and those
#: until it looks at all. A look at all takes 10 ms, in which nobody is answered; by default, hostile requests cause
#: three in a second.
_LOOKS = 700, 10, 10_000
#: Looks at older objects after which all are looked at.
_DUE = 10
#: glibc's M_MMAP_THRESHOLD. Blocks of as many bytes are apart from its heap: they grow without being copied, and what
#: is free is the system's again. glibc alone raises it to 32 MiB once a large body is freed.
_APART, _APART_BYTES = -3, 1024 * 1024


def prepare() -> None:
    """Set Python's collector and glibc's heap, before requests come."""
    gc.set_threshold(*_LOOKS)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_APART, _APART_BYTES)


async def keep_small() -> None:
    """Collect garbage and give free memory back, until this is cancelled. glibc keeps what a burst of requests has left
    in between, for ever."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while True:
        await asyncio.sleep(EVERY_S)
        if gc.get_count()[2] >= _DUE:
            gc.collect()
        if trim is not None:
            await asyncio.to_thread(trim, 0)  # others go on meanwhile
