"""The binary formats: what goes in comes out, and nothing else is ever taken for a chunk."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from embedctl_config import wire
from embedctl_config.errors import SettingsError, WireError, WireForeign, WireTruncated, WireVersion
from embedctl_config.hardware import PRECISIONS
from embedctl_config.outputs import Multi, Output, Sparse, outputs_of
from embedctl_config.record_ids import RecordId
from embedctl_config.settings import MAX_CHUNK_RECORDS
from embedctl_config.wire import ChunkInput, ChunkResult, ErrorCode, RecordError, RecordKind, Truncation

T = TypeVar("T")
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

OBJECTS = st.dictionaries(WORDS, st.none() | st.integers() | WORDS, max_size=2).map(lambda it: json.dumps(it).encode())

FIXED = ChunkInput(7, bytes([0, 0, 1]), [b"one", b"", b"int"], ["a", None, "c"], [9, 3, 2**40])
SPARSE = Sparse(7, (1, 0, 2), struct.pack("<3I", 6, 0, 3), struct.pack("<3f", 0.5, 1, 2))
MULTI = Multi(2, (1, 0, 2), bytes(range(12)), "<f2")
KEPT = dataclasses.replace(FIXED, kept=[b'{"a":1}', b"{}", b'{"a":[null,"\xc3\xbc"]}'])


def ids(rows: int) -> st.SearchStrategy[list[RecordId | None] | None]:
    whole = st.integers(-(2**63), 2**63 - 1)
    decimals = st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**20), max_value=10**20)
    types: list[st.SearchStrategy[Any]] = [WORDS, whole, st.uuids(), decimals, st.binary(max_size=8), st.dates()]
    return st.none() | st.one_of([_list(st.none() | each, rows) for each in types])


@st.composite
def inputs(draw: st.DrawFn, max_rows: int = 6) -> ChunkInput:
    rows = draw(st.integers(0, max_rows))
    return ChunkInput(
        first=draw(U64),
        kinds=bytes(draw(_list(st.sampled_from(RecordKind), rows))),
        texts=draw(_list(st.binary(max_size=20), rows)),
        ids=draw(ids(rows)),
        positions=draw(st.none() | _list(U64, rows)),
        kept=draw(st.none() | _list(OBJECTS, rows)),
    )


@st.composite
def sections(draw: st.DrawFn, rows: int) -> dict[str, Any]:
    width, dtype = draw(st.integers(1, 3)), draw(st.sampled_from(["<f4", "<f2"]))
    counts = draw(_list(st.integers(0, 3), rows))
    words = [draw(st.lists(st.integers(0, 2), min_size=count, max_size=count, unique=True)) for count in counts]
    indices = b"".join(struct.pack(f"<{len(each)}I", *sorted(each)) for each in words)
    numbers = sum(counts) * width * int(dtype[-1])
    sparse = Sparse(3, tuple(counts), indices, draw(st.binary(min_size=len(indices), max_size=len(indices))))
    multi = Multi(width, tuple(counts), draw(st.binary(min_size=numbers, max_size=numbers)), dtype)
    return {"sparse": draw(st.sampled_from([None, sparse])), "multi": draw(st.sampled_from([None, multi]))}


@st.composite
def results(draw: st.DrawFn, max_rows: int = 5) -> ChunkResult:
    rows, dim = draw(st.integers(0, max_rows)), draw(st.integers(0, 4))
    dtype = draw(st.sampled_from(["<f4", "<f2"]))
    size = rows * dim * int(dtype[-1])
    row = st.integers(0, rows - 1) if rows else st.nothing()
    errors = st.builds(RecordError, row, st.sampled_from(ErrorCode), WORDS)
    cuts = st.builds(Truncation, row, U32, U32)
    return ChunkResult(
        first=draw(U64),
        rows=rows,
        dim=dim,
        digest=draw(st.binary(min_size=16, max_size=16)),
        fingerprint=draw(st.binary(min_size=32, max_size=32)).hex(),
        precision=draw(st.sampled_from(PRECISIONS)),
        bounds=draw(WORDS),
        backend=draw(WORDS),
        vectors=draw(st.binary(min_size=size, max_size=size)),
        dtype=dtype,
        checksums=draw(_list(U32, rows)),
        ids=draw(ids(rows)),
        positions=draw(st.none() | _list(U64, rows)),
        errors=draw(st.lists(errors, max_size=3)) if rows else [],
        truncations=draw(st.lists(cuts, max_size=3)) if rows else [],
        kept=draw(st.none() | _list(OBJECTS, rows)),
        tokens=draw(st.none() | _list(U32, rows)),
        **draw(sections(rows)),
    )


def _list(of: st.SearchStrategy[T], size: int) -> st.SearchStrategy[list[T]]:
    return st.lists(of, min_size=size, max_size=size)


def a_result(**changes: Any) -> ChunkResult:
    plain = ChunkResult(
        first=5,
        rows=3,
        dim=2,
        digest=bytes(range(16)),
        fingerprint="ab" * 32,
        precision="fp32",
        backend="torch",
        vectors=np.arange(6, dtype="<f4").tobytes(),
        checksums=[1, 2, 3],
        ids=["a", None, "ü"],
        errors=[RecordError(1, ErrorCode.EMPTY, "the text is empty")],
        truncations=[Truncation(2, 256, 40)],
    )
    return dataclasses.replace(plain, **changes)


@given(inputs())
def test_an_input_comes_back_as_it_was(chunk: ChunkInput) -> None:
    data = wire.encode_input(chunk)
    assert wire.decode_input(data) == chunk
    assert wire.encode_input(dataclasses.replace(chunk)) == data  # so equal chunks have equal digests


@given(results())
def test_a_result_comes_back_as_it_was(result: ChunkResult) -> None:
    found = wire.decode_result(wire.encode_result(result))
    assert dataclasses.replace(found, vectors=bytes(found.vectors)) == result


@hypothesis_settings(max_examples=25)  # each of hundreds of prefixes
@given(inputs(max_rows=3) | results(max_rows=2))
def test_every_strict_prefix_is_an_error_of_ours(chunk: ChunkInput | ChunkResult) -> None:
    decode: Callable[[bytes], object] = wire.decode_input if isinstance(chunk, ChunkInput) else wire.decode_result
    data = wire.encode_input(chunk) if isinstance(chunk, ChunkInput) else wire.encode_result(chunk)
    for end in range(len(data)):
        with pytest.raises(WireTruncated):
            decode(data[:end])


@given(
    st.sampled_from([1, 2]),
    st.integers(0, 255),
    st.integers(0, 7),
    st.sampled_from([0, 1, 3, 2**31, 2**32 - 1]),
    st.binary(max_size=300),
)
def test_random_bytes_are_an_error_of_ours(kind: int, version: int, flags: int, rows: int, rest: bytes) -> None:
    data = struct.pack("<4sBBH16sQI", b"EMBC", kind, version, flags, bytes(16), 0, rows) + rest
    for decode in (wire.decode_input, wire.decode_result):
        try:
            decode(data)
        except WireError:
            continue
        assert decode is wire.decode_result
        assert version == wire.VERSION


@given(st.integers(0, len(wire.encode_input(FIXED)) - 1), st.integers(1, 255))
def test_a_changed_byte_in_an_input_is_noticed(at: int, change: int) -> None:
    data = bytearray(wire.encode_input(FIXED))
    data[at] ^= change
    with pytest.raises(WireError):
        wire.decode_input(bytes(data))


@given(st.integers(0, len(wire.encode_result(a_result(sparse=SPARSE, multi=MULTI))) - 1), st.integers(1, 255))
def test_a_changed_byte_in_a_result_never_raises_anything_but_an_error_of_ours(at: int, change: int) -> None:
    data = bytearray(wire.encode_result(a_result(sparse=SPARSE, multi=MULTI)))
    data[at] ^= change
    with suppress(WireError):
        wire.decode_result(bytes(data))


@pytest.mark.parametrize("foreign", [b"PK\x03\x04" + bytes(100), b"\x93NUMPY" + bytes(100), b'{"text": "x"}' * 9, b"X"])
def test_foreign_bytes_say_how_they_begin(foreign: bytes) -> None:
    with pytest.raises(WireForeign, match="begin with") as raised:
        wire.decode_input(foreign)
    assert repr(foreign[:4]) in str(raised.value)


@pytest.mark.parametrize(
    ("encoded", "decode"),
    [(wire.encode_input(FIXED), wire.decode_input), (wire.encode_result(a_result()), wire.decode_result)],
)
@pytest.mark.parametrize("version", [0, wire.VERSION + 1, 255])
def test_a_chunk_of_another_version_says_both(encoded: bytes, decode: Callable[[bytes], object], version: int) -> None:
    data = bytearray(encoded)
    data[5] = version
    with pytest.raises(WireVersion, match=f"of version {version}, and this embedctl reads version {wire.VERSION}"):
        decode(bytes(data))


def test_an_input_is_no_result_and_the_other_way_round() -> None:
    with pytest.raises(WireForeign, match="kind"):
        wire.decode_result(wire.encode_input(FIXED))
    with pytest.raises(WireForeign, match="kind"):
        wire.decode_input(wire.encode_result(a_result()))


@given(st.binary(min_size=1, max_size=70))
def test_trailing_bytes_are_foreign(more: bytes) -> None:
    with pytest.raises(WireForeign, match=f"{len(more)} bytes after its end"):
        wire.decode_input(wire.encode_input(FIXED) + more)
    with pytest.raises(WireForeign, match=f"{len(more)} bytes after its end"):
        wire.decode_result(wire.encode_result(a_result()) + more)


def test_a_record_kind_that_does_not_exist_is_foreign() -> None:
    with pytest.raises(WireForeign, match="kind of record"):
        wire.decode_input(wire.encode_input(dataclasses.replace(FIXED, kinds=bytes([0, 4, 0]))))


@pytest.mark.parametrize(
    "beyond", [{"errors": [RecordError(3, ErrorCode.EMPTY, "")]}, {"truncations": [Truncation(3, 1, 1)]}]
)
def test_a_row_beyond_the_end_is_foreign(beyond: dict[str, object]) -> None:
    with pytest.raises(WireForeign, match="beyond its own end"):
        wire.decode_result(wire.encode_result(a_result(**beyond)))


@pytest.mark.parametrize(
    ("at", "byte", "says"),
    [
        (40, 9, "type 9"),
        (wire.encode_result(a_result()).index(b"empty"), ord("x"), "'xmpty'"),
        (-len(a_result().vectors) - 1, 1, "padding"),
    ],
)
def test_what_no_version_writes_into_a_result_is_foreign(at: int, byte: int, says: str) -> None:
    data = bytearray(wire.encode_result(a_result()))
    data[at] = byte
    with pytest.raises(WireForeign, match=says):
        wire.decode_result(bytes(data))


def test_no_changed_byte_of_a_section_goes_unnoticed() -> None:
    data = wire.encode_result(a_result(sparse=SPARSE, multi=MULTI))
    for at in range(len(wire.encode_result(a_result())), len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(WireError):
            wire.decode_result(bytes(changed))


@pytest.mark.parametrize(
    "wrong",
    [
        dataclasses.replace(SPARSE, width=6),
        dataclasses.replace(SPARSE, counts=(1, 0, 1)),
        dataclasses.replace(MULTI, counts=(1, 1, 2)),
        dataclasses.replace(MULTI, dtype="<f4"),
    ],
)
def test_outputs_that_contradict_themselves_are_neither_written_nor_read(wrong: Sparse | Multi) -> None:
    name = "sparse" if isinstance(wrong, Sparse) else "multi"
    with pytest.raises((ValueError, WireForeign)):
        wire.decode_result(wire.encode_result(a_result(**{name: wrong})))


def test_outputs_are_named_once_and_stand_in_their_order() -> None:
    assert outputs_of("multi, dense") == (Output.DENSE, Output.MULTI)
    for wrong in ("", "dense,dense", "dense,colbert"):
        with pytest.raises(SettingsError, match="vectors"):
            outputs_of(wrong)
    with pytest.raises(SettingsError, match="name one or more"):
        outputs_of([])


@pytest.mark.parametrize(
    "other",
    [
        {"texts": [b"One", b"", b"int"]},
        {"texts": [b"on", b"e", b"int"]},
        {"ids": ["a", "", "c"]},
        {"ids": None},
        {"kinds": bytes([0, 2, 1])},
        {"first": 8},
        {"positions": [9, 3, 2**41]},
        {"positions": None},
        {"kept": [b"{}"] * 3},
    ],
)
def test_the_digest_differs_when_anything_differs(other: dict[str, Any]) -> None:
    changed = dataclasses.replace(FIXED, **other)
    assert wire.digest_of(wire.encode_input(changed)) != wire.digest_of(wire.encode_input(FIXED))


@pytest.mark.parametrize(
    "other",
    [
        {"texts": [b"One", b"", b"int"]},
        {"ids": ["z", None, "c"]},
        {"kinds": bytes([2, 0, 1])},
        {"kept": [b'{"a":2}', *(KEPT.kept or [])[1:]]},
    ],
)
def test_the_checksum_of_the_row_that_differs_differs_alone(other: dict[str, Any]) -> None:
    mine, theirs = KEPT.row_checksums(), dataclasses.replace(KEPT, **other).row_checksums()
    assert [a != b for a, b in zip(mine, theirs, strict=True)] == [True, False, False]


@given(inputs(), st.data())
def test_select_keeps_texts_kinds_ids_and_positions(chunk: ChunkInput, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(chunk) - 1), unique=True)) if len(chunk) else []
    some = chunk.select(rows)
    assert list(some.texts) == [chunk.texts[row] for row in rows]
    assert list(some.kinds) == [chunk.kinds[row] for row in rows]
    assert some.ids == (None if chunk.ids is None else [chunk.ids[row] for row in rows])
    at = range(chunk.first, chunk.first + len(chunk)) if chunk.positions is None else chunk.positions
    assert some.positions == [at[row] for row in rows]
    assert some.kept == (None if chunk.kept is None else [chunk.kept[row] for row in rows])


def test_vectors_are_a_view_and_begin_at_a_multiple_of_64_bytes() -> None:
    data = bytearray(wire.encode_result(a_result()))
    found = wire.decode_result(memoryview(data))
    assert isinstance(found.vectors, memoryview)
    start = len(data) - len(found.vectors)
    assert start % 64 == 0
    data[start:] = np.full(6, 2.5, "<f4").tobytes()
    np.testing.assert_array_equal(np.frombuffer(found.vectors, "<f4"), np.full(6, 2.5))


@pytest.mark.parametrize("size", [0, 23, 25, 48])
def test_vectors_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes of vectors are not 3 rows"):
        wire.encode_result(a_result(vectors=bytes(size)))


def test_no_input_has_more_rows_than_a_chunk_may_have() -> None:
    largest = ChunkInput(0, bytes(MAX_CHUNK_RECORDS), [b""] * MAX_CHUNK_RECORDS)
    assert len(wire.decode_input(wire.encode_input(largest))) == MAX_CHUNK_RECORDS
    more = ChunkInput(0, bytes(MAX_CHUNK_RECORDS + 1), [b""] * (MAX_CHUNK_RECORDS + 1))
    with pytest.raises(WireForeign, match="promises 16385 rows, and no chunk has more than 16384"):
        wire.decode_input(wire.encode_input(more))


#: What the release before kept fields wrote for FIXED and for a result of it.
INPUT_BEFORE = (
    "454d424301010300ad779c8eb22c9a67a869561072d06dce0700000000000000030000000000010300000000000000030000"
    "006f6e65696e740001000000ffffffff010000006163090000000000000003000000000000000000000000010000"
)
RESULT_BEFORE = (
    "454d424302010100000102030405060708090a0b0c0d0e0f0500000000000000030000000200000001ababababababababab"
    "ababababababababababababababababababababababab040000000e00000066703332746f726368203931653739303137b4"
    "cf107200000000cfbbda330001000000ffffffff0200000061c3bc010000000100000005000000656d707479110000007468"
    "65207465787420697320656d707479010000000200000000010000280000000000000000000000000000000000000000803f"
    "0000004000004040000080400000a040"
)


def test_a_job_that_keeps_nothing_has_the_bytes_that_it_had_before() -> None:
    result = a_result(checksums=FIXED.row_checksums())
    assert wire.encode_input(FIXED).hex() == INPUT_BEFORE
    assert wire.encode_result(result).hex() == RESULT_BEFORE
    assert wire.decode_input(bytes.fromhex(INPUT_BEFORE)) == FIXED
    read = wire.decode_result(bytes.fromhex(RESULT_BEFORE))
    assert dataclasses.replace(read, vectors=bytes(read.vectors)) == result


def test_vectors_in_float16_take_half_the_room_and_come_back_bit_by_bit() -> None:
    halves = np.array([[np.nan, 1], [np.inf, -0.0], [6e-8, 65504]], "<f2").tobytes()
    result = a_result(vectors=halves, dtype="<f2")
    data = wire.encode_result(result)
    assert data[40] == 2
    assert len(data) == len(wire.encode_result(a_result())) - 12
    found = wire.decode_result(data)
    assert dataclasses.replace(found, vectors=bytes(found.vectors)) == result
    data = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(WireForeign, match="vectors of a result are damaged"):
        wire.decode_result(data)


@pytest.mark.parametrize(
    "cell", [b"", b"{", b"[1]", b'"title"', b"{}{}", b'{"a": "\xff"}', b"null", b"[" * 50_000, b'{"a":' * 20_000]
)
def test_kept_fields_that_are_no_json_object_are_foreign(cell: bytes) -> None:
    for data, decode in (
        (wire.encode_input(dataclasses.replace(FIXED, kept=[b"{}", cell, b"{}"])), wire.decode_input),
        (wire.encode_result(a_result(kept=[b"{}", b"{}", cell])), wire.decode_result),
    ):
        with pytest.raises(WireForeign, match="kept fields that are not a JSON object"):
            decode(data)


@hypothesis_settings(max_examples=25)  # each of hundreds of prefixes
@given(results(max_rows=2))
def test_a_head_says_what_the_whole_says_but_for_fields_and_vectors(result: ChunkResult) -> None:
    data, heads = wire.encode_result(result), []
    for size in range(len(data) + 1):
        try:
            heads.append(wire.decode_result_head(data[:size]))
        except WireTruncated:
            assert not heads, "what was enough is enough with more"
    assert heads
    assert all(
        head == dataclasses.replace(result, dim=0, vectors=b"", kept=None, sparse=None, multi=None) for head in heads
    )


def test_the_head_of_a_result_is_read_without_its_kept_fields() -> None:
    result = a_result(kept=[b'{"a":"' + bytes(100_000).replace(b"\0", b"x") + b'"}'] * 3)
    head = wire.decode_result_head(wire.encode_result(result)[:1000])
    assert (head.errors, head.ids, head.kept) == (result.errors, result.ids, None)
