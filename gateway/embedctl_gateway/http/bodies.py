"""Bodies of JSON. A large one is looked at before objects are made of it, and parsed in small steps. So it neither
takes many times its size, nor keeps the process from others for long."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from embedctl_gateway.http.refusals import refuse

T = TypeVar("T")

#: A body of no more bytes is small.
SMALL_BYTES = 64 * 1024
#: Most brackets, braces and commas of a body outside of its strings: each value has one. Sixteen times the texts that a
#: request may have.
MAX_MARKS = 32 * 2048
#: Bytes of a step, and its marks.
_STEP_BYTES, _STEP_MARKS = 128 * 1024, 2 * 2048
#: After a step, others have their turn for so many times as long as it took: in its time, they wait for it again and
#: again.
_PACE = 3
#: The parser takes no deeper arrays or objects.
_DEEPEST = 1024
_OPENING, _CLOSING, _COMMA = (np.frombuffer(each, np.uint8) for each in (b"[{", b"]}", b","))
#: Byte → whether it is one of the marks.
_MARKS = np.isin(np.arange(256), np.concatenate([_OPENING, _CLOSING, _COMMA]))


def is_large(body: bytes | bytearray) -> bool:
    """Whether a body takes long to parse: it has many bytes, or perhaps many values."""
    return len(body) > SMALL_BYTES or sum(map(body.count, b"[{,")) > _STEP_MARKS


def fields_of(body: bytes | bytearray, longest: int) -> dict[str, Any]:
    """The fields of a body, which is a JSON object; raises Refusal if it is none, has too many values, or a text that
    is surely longer than the `longest` (bytes)."""
    try:
        fields = _large(body, longest) if is_large(body) else orjson.loads(body)
    except orjson.JSONDecodeError as error:
        refuse(f"the body is not valid JSON in UTF-8: {error}", "invalid_json")
    if not isinstance(fields, dict):
        refuse("the body is no JSON object", "invalid_json")
    return fields


def check_values(text: bytes) -> None:
    """Refuse JSON with more values than a request may have, before objects are made of it."""
    for _ in _marks(text):
        pass


def _large(body: bytes | bytearray, longest: int) -> object:
    """The value of a large body. The elements of arrays in its fields are parsed apart, a few at a time."""
    marks = np.concatenate([*paced(_marks(body))])
    # Of six bytes, an escape makes one byte at least.
    if np.diff(marks, prepend=0, append=len(body)).max() > 6 * longest + SMALL_BYTES:
        refuse(f"a text has more than {longest:,} bytes (max_text_bytes)", "invalid_value")
    kinds = np.frombuffer(body, np.uint8)[marks]
    depth = np.cumsum(np.isin(kinds, _OPENING).astype(np.int64) - np.isin(kinds, _CLOSING))
    ends = np.flatnonzero(depth < 2)
    arrays: dict[str, list[Any]] = {}
    rest, at, left = bytearray(), 0, len(marks)
    for first in np.flatnonzero((kinds == ord("[")) & (depth == 2)):
        after = int(np.searchsorted(ends, first))
        if after == len(ends):  # it has no end, and the parser says so
            break
        last = ends[after]
        begin, end = int(marks[first]), int(marks[last])
        if body[end] != ord("]") or (end - begin < _STEP_BYTES and last - first < _STEP_MARKS):
            continue
        within = slice(first, last)
        commas = first + np.flatnonzero((kinds[within] == _COMMA) & (depth[within] == 2))
        some = _parsed(body, marks[first:], [*(commas - first).tolist(), int(last - first)])
        name = secrets.token_hex(16)
        arrays[name] = [each for values in paced(some) for each in values]
        rest += body[at:begin] + f'"{name}"'.encode()
        at, left = end + 1, left - int(last - first)
    if left > _STEP_MARKS:
        _too_many(_STEP_MARKS, "its fields' arrays and its texts")
    found = orjson.loads(rest + body[at:])
    if isinstance(found, dict):
        found = {name: arrays.get(value, value) if isinstance(value, str) else value for name, value in found.items()}
    return found


def paced(steps: Iterable[T]) -> Iterator[T]:
    """Pauses between steps, in which others have their turn."""
    began = time.perf_counter()
    for each in steps:
        yield each
        time.sleep(_PACE * (time.perf_counter() - began))
        began = time.perf_counter()


def _marks(body: bytes | bytearray) -> Iterator[npt.NDArray[np.int64]]:
    """Where brackets, braces and commas are, outside of strings, step by step; raises Refusal if there are too many."""
    at = count = depth = 0
    in_string = False
    while at < len(body):
        step = body[at : at + _STEP_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # what it escapes is in the next step
            step = step[:-1] or step
        plain = np.frombuffer(step.replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
        strings = np.bitwise_xor.accumulate(plain == ord('"')) ^ in_string
        found = np.flatnonzero(_MARKS[plain] & ~strings)
        count += len(found)
        depth += int(np.isin(plain[found], _OPENING).sum()) - int(np.isin(plain[found], _CLOSING).sum())
        if depth > _DEEPEST:
            raise orjson.JSONDecodeError("arrays or objects are too deep", "", 0)
        if count > MAX_MARKS:
            _too_many(MAX_MARKS, "its texts")
        yield found + at
        at, in_string = at + len(step), bool(strings[-1])


def _parsed(body: bytes | bytearray, marks: npt.NDArray[np.int64], ends: list[int]) -> Iterator[list[Any]]:
    """The elements of an array that begins at the first mark, some at a time. Each ends at one of these marks. Raises
    Refusal if one of them has too many values."""
    begin = before = 0
    for end in ends:
        if end - before > _STEP_MARKS:
            _too_many(_STEP_MARKS, "its fields' arrays and its texts")
        before = end
        size = int(marks[end] - marks[begin])
        if size >= _STEP_BYTES or end - begin >= _STEP_MARKS or end == ends[-1]:
            values = orjson.loads(b"[" + body[int(marks[begin]) + 1 : int(marks[end])] + b"]")
            if not values:  # nothing stands between two commas, or behind the last one
                raise orjson.JSONDecodeError("an element is missing", "", 0)
            yield values
            begin = end


def _too_many(most: int, outside: str) -> NoReturn:
    refuse(
        f"the body has more than {most:,} brackets, braces and commas outside of {outside}; a request has up to 2,048 "
        "texts. Ids of tokens are refused: with LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False",
        "too_many_inputs",
        status=413,
    )
