"""The binary formats of a chunk's input and of its result.

Both begin with the same 36 bytes, all little-endian::

    0   4s   magic "EMBC"
    4   u8   kind: 1 input, 2 result; 3 and 4 the same outside of Redis (embedctl.chunk_files.references)
    5   u8   format version
    6   u16  flags: 1 ids, 2 explicit positions, 4 kept fields; only in results: 8 tokens, 16 sparse, 32 multi
    8   16s  digest of the input (in a result: of the input that it answers)
    24  u64  position of the first record
    32  u32  rows

Scripts read the digest from both at the same place. A *column* is u32 lengths, one per row, then the bytes; length
0xFFFFFFFF is null. *Ids* are u8, the type of all of them (embedctl_config.record_ids.Kind), and a column.

Input: ``u8 kinds[rows]``, ``column texts``, [``ids``], [``u64 positions[rows]``], [``column kept``]. A kept cell
is a record's kept fields: one JSON object, in UTF-8.

Result: ``u32 dim``, ``u8 dtype`` (1 = float32, 2 = float16), ``32s fingerprint``, ``column (precision, backend)``,
``u32 crc32[rows]`` of the input's rows, [``ids``], [``u64 positions[rows]``], [``u32 tokens[rows]``],
``u32 n``, ``u32 row[n]``, ``column codes``, ``column messages``, ``u32 n``, ``(u32 row, used, lost)[n]``,
[``column kept``], zero bytes up to a multiple of 64, then ``rows × dim`` numbers of that type, row-major; a failed
record's row is NaN. A class's own bounds, if any, follow the precision after a space. The vectors' crc32, eight
hexadecimal digits, follows the backend after a space. Then come, each after zero bytes up to a multiple of 64, the
sections of sparse vectors and of multi-vectors (embedctl_config.outputs). `dim` is 0 without dense vectors.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

from embedctl_config.errors import WireForeign, WireTruncated, WireVersion
from embedctl_config.outputs import DTYPES, NUMBERS, SIZES, Multi, Sparse
from embedctl_config.record_ids import IdType, Kind, RecordId, from_wire, to_wire
from embedctl_config.settings import MAX_CHUNK_RECORDS

MAGIC = b"EMBC"
#: The version of jobs and chunks. Programs leave those of any other version alone.
VERSION = 1
#: First and last byte of the digest: GETRANGE's arguments.
DIGEST_RANGE = (8, 23)
#: Offset of the number of rows, a u32.
ROWS_AT = 32
#: Offset of the kind, a u8; and what is added to it in a reference to a chunk outside of Redis, whose size, a u64,
#: follows the prefix.
KIND_AT, ELSEWHERE = 4, 2
#: The bytes that every chunk and every reference to one begin with.
PREFIX_BYTES = 36

_KIND_INPUT, _KIND_RESULT = 1, 2
_HAS_IDS, _HAS_POSITIONS, _HAS_KEPT, _HAS_TOKENS, _HAS_SPARSE, _HAS_MULTI = 1, 2, 4, 8, 16, 32
_PREFIX = struct.Struct("<4sBBH16sQI")
_RESULT_HEAD = struct.Struct("<IB32s")
_Kind = TypeVar("_Kind", Sparse, Multi)
_NULL = 0xFFFFFFFF
_ALIGNMENT = 64


class RecordKind(IntEnum):
    """What the producer saw in a record's text field."""

    TEXT = 0
    NOT_TEXT = 1  # the row's bytes name the type that was found
    INVALID_UTF8 = 2  # the row's bytes are what was found
    OVERSIZE = 3  # the row's bytes are its size in bytes, in decimal


class ErrorCode(StrEnum):
    """Why a record has no vector."""

    EMPTY = "empty"
    NOT_TEXT = "not_text"
    INVALID_UTF8 = "invalid_utf8"
    TOO_LONG = "too_long"
    NO_PROMPT = "no_prompt"
    NO_DIMENSIONS = "no_dimensions"
    NO_OUTPUT = "no_output"
    NON_FINITE = "non_finite"
    OUT_OF_MEMORY = "out_of_memory"
    ENCODE_ERROR = "encode_error"
    CRASHED_WORKER = "crashed_worker"


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """Records of one job that travel together.

    `kinds` and `texts` have one entry per row; a text is UTF-8. `ids` is None if the job has none; they have one type.
    `positions` is None if the records are consecutive from `first`. `kept` has a JSON object per row, in UTF-8; it is
    None if the job keeps no fields.
    """

    first: int
    kinds: bytes
    texts: Sequence[bytes]
    ids: Sequence[RecordId | None] | None = None
    positions: Sequence[int] | None = None
    kept: Sequence[bytes] | None = None

    def __len__(self) -> int:
        return len(self.kinds)

    def row_checksums(self) -> list[int]:
        """crc32 of each row's kind, text, id and kept fields: shows which record differs when a corpus has changed."""
        sums = []
        for row, text in enumerate(self.texts):
            crc = zlib.crc32(text, self.kinds[row])
            if self.ids is not None:
                label = self.ids[row]
                crc = zlib.crc32(b"" if label is None else bytes([IdType.of(label).kind]) + to_wire(label), crc)
            if self.kept is not None:
                crc = zlib.crc32(self.kept[row], zlib.crc32(b"\1", crc))
            sums.append(crc)
        return sums

    def select(self, rows: Sequence[int]) -> ChunkInput:
        """A chunk of these rows alone, at their original positions."""
        at = self.positions
        return ChunkInput(
            first=self.first,
            kinds=bytes(self.kinds[row] for row in rows),
            texts=[self.texts[row] for row in rows],
            ids=None if self.ids is None else [self.ids[row] for row in rows],
            positions=[self.first + row if at is None else at[row] for row in rows],
            kept=None if self.kept is None else [self.kept[row] for row in rows],
        )


@dataclass(frozen=True, slots=True)
class RecordError:
    """A record without a vector: its row in the chunk, the reason and a sentence for people."""

    row: int
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Truncation:
    """A record that was cut to the model's maximum length: tokens used and tokens lost."""

    row: int
    used: int
    lost: int


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The vectors of a chunk: `rows × dim` numbers, row-major, as bytes.

    `dtype` is NumPy's name of their type: `<f4` or `<f2`. `fingerprint` is a sha256 in hexadecimal. `checksums` are the
    input's :meth:`ChunkInput.row_checksums`. `tokens` are the numbers of tokens encoded for each row, special ones
    included, 0 for a failed row; None if the job does not count them. `bounds` are the class's own bounds for the
    vectors, in words; empty if the precision's bounds apply. `sparse` and `multi` are None if they were not asked for.
    """

    first: int
    rows: int
    dim: int
    digest: bytes
    fingerprint: str
    precision: str
    backend: str
    vectors: bytes | memoryview
    checksums: Sequence[int]
    ids: Sequence[RecordId | None] | None = None
    positions: Sequence[int] | None = None
    errors: Sequence[RecordError] = ()
    truncations: Sequence[Truncation] = field(default=())
    bounds: str = ""
    kept: Sequence[bytes] | None = None
    dtype: str = "<f4"
    tokens: Sequence[int] | None = None
    sparse: Sparse | None = None
    multi: Multi | None = None


def encode_input(chunk: ChunkInput) -> bytes:
    """The wire form of a chunk's input; its digest covers everything but the digest itself."""
    flags, optional = _optional_columns(chunk.ids, chunk.positions)
    if chunk.kept is not None:
        flags |= _HAS_KEPT
        optional.append(_column(chunk.kept))
    body = b"".join([chunk.kinds, _column(chunk.texts), *optional])
    facts = struct.pack("<HQI", flags, chunk.first, len(chunk))
    digest = hashlib.blake2b(body, digest_size=16, key=facts).digest()
    return _PREFIX.pack(MAGIC, _KIND_INPUT, VERSION, flags, digest, chunk.first, len(chunk)) + body


def digest_of(data: bytes | memoryview) -> bytes:
    """The 16 bytes that identify a chunk's input."""
    return bytes(data[DIGEST_RANGE[0] : DIGEST_RANGE[1] + 1])


def decode_input(data: bytes | memoryview) -> ChunkInput:
    """Read a chunk's input; raises WireError if the bytes are cut off, not ours, or of another version."""
    cursor, flags, digest, first, rows = _open(data, _KIND_INPUT)
    if rows > MAX_CHUNK_RECORDS:  # checked before it allocates: half a gigabyte holds 100 million empty rows
        raise WireForeign(f"a chunk's input promises {rows} rows, and no chunk has more than {MAX_CHUNK_RECORDS}")
    body = cursor.rest()
    kinds = cursor.take(rows)
    if any(kind > max(RecordKind) for kind in kinds):
        raise WireForeign("a chunk's input holds a kind of record that does not exist")
    texts = [b"" if text is None else text for text in cursor.column(rows)]
    ids, positions = _read_optional_columns(cursor, flags, rows)
    kept = _read_kept(cursor, flags, rows)
    cursor.finish()
    facts = struct.pack("<HQI", flags, first, rows)
    if hashlib.blake2b(body, digest_size=16, key=facts).digest() != digest:
        raise WireForeign("a chunk's input does not match its digest: it was changed or mixed up on the way")
    return ChunkInput(first, bytes(kinds), texts, ids, positions, kept)


def encode_result(result: ChunkResult) -> bytes:
    """The wire form of a result; raises ValueError unless `vectors` is `rows × dim` and the fingerprint a sha256."""
    if len(result.vectors) != result.rows * result.dim * SIZES[result.dtype]:
        raise ValueError(
            f"{len(result.vectors)} bytes of vectors are not {result.rows} rows × {result.dim} {result.dtype}"
        )
    fingerprint = bytes.fromhex(result.fingerprint)
    if len(fingerprint) != 32:
        raise ValueError(f"a fingerprint of {len(fingerprint)} bytes is not a sha256")
    flags, optional = _optional_columns(result.ids, result.positions)
    flags |= 0 if result.kept is None else _HAS_KEPT
    if result.tokens is not None:
        flags |= _HAS_TOKENS
        optional.append(struct.pack(f"<{result.rows}I", *result.tokens))
    flags |= _HAS_SPARSE * (result.sparse is not None) | _HAS_MULTI * (result.multi is not None)
    errors, cuts = result.errors, result.truncations
    promise = f"{result.precision} {result.bounds}" if result.bounds else result.precision
    head = b"".join(
        [
            _PREFIX.pack(MAGIC, _KIND_RESULT, VERSION, flags, result.digest, result.first, result.rows),
            _RESULT_HEAD.pack(result.dim, NUMBERS[result.dtype], fingerprint),
            _column([promise.encode(), f"{result.backend} {zlib.crc32(result.vectors):08x}".encode()]),
            struct.pack(f"<{result.rows}I", *result.checksums),
            *optional,
            struct.pack(f"<I{len(errors)}I", len(errors), *(error.row for error in errors)),
            _column([error.code.encode() for error in errors]),
            _column([error.message.encode(errors="replace") for error in errors]),
            struct.pack("<I", len(cuts)),
            *(struct.pack("<III", cut.row, cut.used, cut.lost) for cut in cuts),
            *([] if result.kept is None else [_column(result.kept)]),
        ]
    )
    sections = [part.section() for part in (result.sparse, result.multi) if part is not None]
    return b"".join(_aligned([head, result.vectors, *sections]))


def decode_result(data: bytes | memoryview) -> ChunkResult:
    """Read a chunk's result; `vectors` is a view into `data`, not a copy. Raises as :func:`decode_input`."""
    cursor, flags, checksum, head = _read_head(data)
    kept = _read_kept(cursor, flags, head.rows)
    cursor.align(_ALIGNMENT)
    vectors = cursor.take(head.rows * head.dim * SIZES[head.dtype])
    sparse = _read_section(cursor, Sparse, head.rows) if flags & _HAS_SPARSE else None
    multi = _read_section(cursor, Multi, head.rows) if flags & _HAS_MULTI else None
    cursor.finish()
    if checksum != f"{zlib.crc32(vectors):08x}":
        raise WireForeign("the vectors of a result are damaged: their checksum does not match. Submit the corpus again")
    return replace(head, vectors=vectors, kept=kept, sparse=sparse, multi=multi)


def decode_result_head(data: bytes | memoryview) -> ChunkResult:
    """Read everything before the kept fields and the vectors of a result, whose first bytes suffice; `dim` is 0.

    Raises WireTruncated if more bytes are needed, and otherwise as :func:`decode_result`.
    """
    return replace(_read_head(data)[3], dim=0)


def _read_head(data: bytes | memoryview) -> tuple[_Cursor, int, str, ChunkResult]:
    """A cursor at the end of the head; the flags; the vectors' checksum; the result so far."""
    cursor, flags, digest, first, rows = _open(data, _KIND_RESULT)
    dim, dtype, fingerprint = cursor.unpack(_RESULT_HEAD)
    if dtype not in DTYPES:
        raise WireForeign(f"a result's vectors are of type {dtype}, which does not exist")
    promise, made_by = _words(cursor.column(2))
    precision, _, bounds = promise.partition(" ")
    backend, _, checksum = made_by.rpartition(" ")
    checksums = cursor.numbers(rows, "I")
    ids, positions = _read_optional_columns(cursor, flags, rows)
    tokens = cursor.numbers(rows, "I") if flags & _HAS_TOKENS else None
    errors = _read_errors(cursor)
    cuts = cursor.numbers(3 * cursor.count(), "I")
    if any(row >= rows for row in (*(error.row for error in errors), *cuts[::3])):
        raise WireForeign("a result names a row beyond its own end")
    return (
        cursor,
        flags,
        checksum,
        ChunkResult(
            first=first,
            rows=rows,
            dim=dim,
            digest=digest,
            fingerprint=fingerprint.hex(),
            precision=precision,
            backend=backend,
            bounds=bounds,
            vectors=b"",
            dtype=DTYPES[dtype],
            checksums=checksums,
            ids=ids,
            positions=positions,
            tokens=tokens,
            errors=errors,
            truncations=[Truncation(*cuts[at : at + 3]) for at in range(0, len(cuts), 3)],
        ),
    )


def _read_section(cursor: _Cursor, kind: type[_Kind], rows: int) -> _Kind:
    cursor.align(_ALIGNMENT)
    return kind.read(cursor.take, rows)


def _aligned(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The parts, and before each but the first zero bytes up to a multiple of the alignment."""
    at = 0
    for part in parts:
        padding = bytes(-at % _ALIGNMENT)
        yield padding
        yield part
        at += len(padding) + len(part)


def _read_errors(cursor: _Cursor) -> list[RecordError]:
    rows = cursor.numbers(cursor.count(), "I")
    codes, messages = _words(cursor.column(len(rows))), _words(cursor.column(len(rows)))
    return [RecordError(row, _error_code(code), text) for row, code, text in zip(rows, codes, messages, strict=True)]


def _error_code(word: str) -> ErrorCode:
    try:
        return ErrorCode(word)
    except ValueError:
        raise WireForeign(f"a result holds the error code {word!r}, which does not exist") from None


def _words(column: Sequence[bytes | None]) -> list[str]:
    try:
        return [(word or b"").decode() for word in column]
    except UnicodeDecodeError as error:
        raise WireForeign(f"a chunk holds a word that is not UTF-8: {error}") from None


def _column(cells: Sequence[bytes | None]) -> bytes:
    lengths = [_NULL if cell is None else len(cell) for cell in cells]
    return b"".join([struct.pack(f"<{len(cells)}I", *lengths), *(cell for cell in cells if cell)])


def _optional_columns(
    ids: Sequence[RecordId | None] | None, positions: Sequence[int] | None
) -> tuple[int, list[bytes]]:
    flags, columns = 0, []
    if ids is not None:
        flags |= _HAS_IDS
        kinds = {IdType.of(label).kind for label in ids if label is not None} or {Kind.TEXT}
        if len(kinds) > 1:
            raise ValueError("the ids of a chunk have several types")
        columns.append(bytes(kinds) + _column([None if label is None else to_wire(label) for label in ids]))
    if positions is not None:
        flags |= _HAS_POSITIONS
        columns.append(struct.pack(f"<{len(positions)}Q", *positions))
    return flags, columns


def _read_optional_columns(
    cursor: _Cursor, flags: int, rows: int
) -> tuple[list[RecordId | None] | None, list[int] | None]:
    ids: list[RecordId | None] | None = None
    if flags & _HAS_IDS:
        (kind,) = cursor.take(1)
        column = cursor.column(rows)
        try:
            ids = [None if cell is None else from_wire(kind, cell) for cell in column]
        except ValueError as error:
            raise WireForeign(f"a chunk holds an id that is none: {error}") from None
    positions = cursor.numbers(rows, "Q") if flags & _HAS_POSITIONS else None
    return ids, positions


def _read_kept(cursor: _Cursor, flags: int, rows: int) -> list[bytes] | None:
    if not flags & _HAS_KEPT:
        return None
    cells = cursor.column(rows)
    if not all(map(_is_object, cells)):
        raise WireForeign("a chunk holds kept fields that are not a JSON object")
    return [cell or b"" for cell in cells]


def _is_object(cell: bytes | None) -> bool:
    try:
        return isinstance(json.loads((cell or b"").decode()), dict)
    except (ValueError, RecursionError):
        return False


def _open(data: bytes | memoryview, kind: int) -> tuple[_Cursor, int, bytes, int, int]:
    cursor = _Cursor(memoryview(data))
    if bytes(data[:4]) != MAGIC[: len(data[:4])]:
        raise WireForeign(f"these are not a chunk's bytes: they begin with {bytes(data[:4])!r}")
    _, found, version, flags, digest, first, rows = cursor.unpack(_PREFIX)
    if version != VERSION:
        raise WireVersion(
            f"this chunk is of version {version}, and this embedctl reads version {VERSION}: use the one that wrote it"
        )
    if found != kind:
        raise WireForeign(f"a chunk of kind {kind} was expected, not kind {found}")
    return cursor, flags, digest, first, rows


class _Cursor:
    """Reads bytes forward and never past their end, so that a bad count can't cause a large allocation."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._data):
            raise WireTruncated(f"a chunk ends after {len(self._data)} bytes, but promises {end} or more")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def rest(self) -> memoryview:
        return self._data[self._at :]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def numbers(self, count: int, code: str) -> list[int]:
        size = struct.calcsize(f"<{code}")
        return list(struct.unpack(f"<{count}{code}", self.take(count * size)))

    def count(self) -> int:
        return self.numbers(1, "I")[0]

    def column(self, rows: int) -> list[bytes | None]:
        return [None if size == _NULL else bytes(self.take(size)) for size in self.numbers(rows, "I")]

    def align(self, to: int) -> None:
        if any(self.take(-self._at % to)):
            raise WireForeign("a result's padding is not zero")

    def finish(self) -> None:
        if self._at != len(self._data):
            raise WireForeign(f"a chunk goes on for {len(self._data) - self._at} bytes after its end")
