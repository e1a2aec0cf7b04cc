"""What Redis holds of a chunk whose bytes are outside of it.

A reference begins with the 36 bytes that every chunk begins with (:mod:`embedctl_config.wire`), so that scripts find
the digest and the number of rows where they always are. Its kind is that of the chunk plus 2. Then follow, all
little-endian::

    36  u64  size of the chunk in bytes
    44  u32  crc32 of the chunk
    48  8s   id of the place
    56       name below the place, in ASCII
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

from embedctl_config import wire
from embedctl_config.errors import WireForeign

_TAIL = struct.Struct("<QI8s")
#: At least as long as every reference (bytes).
MOST_BYTES = 256
#: The form of a name: `DATABASE/DAY/JOB/in|out/SHARD/CHUNK.TOKEN`. Another program may have written what Redis holds,
#: and must not choose which files we read or remove.
NAME = re.compile(r"\d{1,20}/\d{8}/(\d{8}-\d{6}-[0-9a-f]{10})/(in|out)/\d{6,}/(\d+)\.[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a chunk's bytes are: their name below a place, whose id is in hexadecimal, and their size and crc32."""

    name: str
    place: str
    size: int
    crc32: int

    def fits(self, data: bytes, size: int | None = None) -> bool:
        """Whether these are the bytes, or can be the first `size` of them."""
        if size is not None and size < self.size:
            return len(data) == size
        return len(data) == self.size and zlib.crc32(data) == self.crc32


def reference_to(payload: bytes, name: str, place: str) -> bytes:
    """The reference to a chunk that has this name at this place."""
    prefix = bytearray(payload[: wire.PREFIX_BYTES])
    prefix[wire.KIND_AT] += wire.ELSEWHERE
    tail = _TAIL.pack(len(payload), zlib.crc32(payload), bytes.fromhex(place))
    return bytes(prefix) + tail + name.encode("ascii")


def is_reference(value: bytes) -> bool:
    """Whether a value of Redis begins like a reference."""
    return value[:4] == wire.MAGIC and len(value) > wire.KIND_AT and value[wire.KIND_AT] > wire.ELSEWHERE


def parse_reference(value: bytes) -> Reference | None:
    """The reference that a value of Redis is; None if it is a chunk itself. Raises WireForeign if it is neither."""
    if not is_reference(value):
        return None
    head = wire.PREFIX_BYTES + _TAIL.size
    name = value[head:].decode("ascii", "replace")
    if NAME.fullmatch(name) is None:
        raise WireForeign("a reference to a chunk outside of Redis has a name that embedctl never gives")
    size, crc32, place = _TAIL.unpack(value[wire.PREFIX_BYTES : head])
    return Reference(name, place.hex(), size, crc32)
