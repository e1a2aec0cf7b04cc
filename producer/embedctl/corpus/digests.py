"""Digests of texts: the SHA-256 of a text's UTF-8 bytes, which comes out beside the vector. It travels as a kept field
of embedctl's own, so workers and Redis know nothing of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from embedctl.corpus.kept import DIGEST_FIELD, with_members
from embedctl.corpus.records import Record
from embedctl_config.errors import WireForeign
from embedctl_config.wire import RecordKind

#: uint8, records × 32. The digest of a record without a text is all zeros.
Digests = npt.NDArray[np.uint8]
DIGEST_BYTES = 32
NO_DIGEST = bytes(DIGEST_BYTES)


def digest_of(record: Record) -> bytes:
    """The digest of a record's text; all zeros if it has none that could be encoded."""
    return hashlib.sha256(record.text).digest() if record.kind is RecordKind.TEXT else NO_DIGEST


def with_digests(records: Iterable[Record]) -> Iterator[Record]:
    """The records, each with the digest of its text among its kept fields."""
    for record in records:
        own = f'{{"{DIGEST_FIELD}":"{digest_of(record).hex()}"}}'.encode()
        yield record._replace(kept=with_members(record.kept, own))


def taken_out(kept: Sequence[dict[str, Any]]) -> Digests | None:
    """Remove the digests from the kept fields of records; returns them, or None if there are none. Raises WireForeign
    if one is no digest."""
    found = [fields.pop(DIGEST_FIELD, None) for fields in kept]
    if all(digest is None for digest in found):
        return None
    return as_rows(b"".join(NO_DIGEST if digest is None else _parsed(digest) for digest in found))


def _parsed(digest: object) -> bytes:
    try:
        data = bytes.fromhex(str(digest))
    except ValueError:
        data = b""
    if len(data) != DIGEST_BYTES:
        raise WireForeign("a result holds a digest of a text that is none: another program has written it")
    return data


def as_rows(digests: bytes) -> Digests:
    """Digests, one after the other, as an array."""
    return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
