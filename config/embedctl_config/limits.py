"""The bounds and times that nobody turns: constants, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that hold everywhere. No source of settings decides them; tests give others."""

    #: A producer pauses while its job has more text than this waiting for workers (bytes). 0: a sixteenth of Redis'
    #: maxmemory, or 256 MiB if that is not set. So several jobs fit beside their results, and each keeps
    #: many workers busy.
    high_water_bytes: int = 0
    #: A job that is drained pauses while Redis holds more of its results than this (bytes). 0: a quarter of maxmemory,
    #: or 1 GiB. A vector of 384 dimensions is about four times as large as the text that it comes from.
    results_high_water_bytes: int = 0
    #: About how many records a part of a drained job holds. Such a part takes 150 MB at 384 dimensions: few files even
    #: for a large corpus, and little to encode again if a drainer dies in the middle of one.
    part_records: int = 100_000
    #: A chunk that is no larger stays in Redis even with `chunk_files` (bytes): a file's own costs exceed its bytes.
    chunk_inline_bytes: int = 4096
    #: Most requests that the gateway answers at once; callers of more are asked to come again. Each holds its texts and
    #: vectors in memory, some 50 KiB for a single text. A thousand clients who ask at once all have a place.
    gateway_in_flight: int = 2048
