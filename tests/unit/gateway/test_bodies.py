"""Large bodies of JSON are what a parser says that they are, and those with too many values are refused unparsed."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from embedctl_gateway.http.bodies import MAX_MARKS, SMALL_BYTES, fields_of
from embedctl_gateway.http.refusals import Refusal

LONGEST = 2**20
PIECES = ['"', "\\", ",", "[", "]", "{", "}", ":", "é", "😀", "\n", "word "]


def test_a_large_body_is_what_a_parser_says(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    monkeypatch.setattr("embedctl_gateway.http.bodies.SMALL_BYTES", 0)
    for step in (2, 7, 100):
        monkeypatch.setattr("embedctl_gateway.http.bodies._STEP_BYTES", step)
        monkeypatch.setattr("embedctl_gateway.http.bodies._paced", lambda steps: steps)
        for _ in range(60):
            texts = ["".join(draw.choices(PIECES, k=draw.randrange(12))) for _ in range(draw.randrange(1, 6))]
            fields = {"model": texts[0], "input": texts, "other": [[1, 2], {"a": [texts, {}]}, None], "n": 1.5}
            body = orjson.dumps(fields, option=draw.choice([0, orjson.OPT_INDENT_2]))
            assert fields_of(body, LONGEST) == fields
            at = draw.randrange(len(body))
            damaged = body[:at] + draw.choice([b"", b",", b'"', b"]", b"}", b"\xff", b"1"]) + body[at + 1 :]
            assert parsed(damaged) == expected(damaged), damaged


def parsed(body: bytes) -> object:
    with suppress(Refusal):
        return fields_of(body, LONGEST)
    return None


def expected(body: bytes) -> object:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


@pytest.mark.parametrize("value", [b'"a"', b"{}", b"[1]", b'["\\"]"]'])
def test_too_many_values_are_refused_before_objects_are_made_of_them(value: bytes) -> None:
    body = b'{"input":[' + (value + b",") * 1_000_000 + value + b"]}"
    tracemalloc.start()
    try:
        with pytest.raises(Refusal) as refused:
            fields_of(body, LONGEST)
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()
    assert (refused.value.status, refused.value.code) == (413, "too_many_inputs")
    assert len(body) > MAX_MARKS


def test_many_small_values_are_parsed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"input": [[1]] * 10_000, "others": [{}] * 5_000, "model": "m"}
    body, sizes = orjson.dumps(fields), []

    def loads(part: bytes) -> Any:
        sizes.append(len(part))
        return orjson.loads(part)

    monkeypatch.setattr("embedctl_gateway.http.bodies.orjson", SimpleNamespace(loads=loads))
    assert len(body) <= SMALL_BYTES
    assert fields_of(body, LONGEST) == fields
    assert max(sizes) < len(body) / 3


@pytest.mark.parametrize("value", [b"{%b}", b"[%b]", b'{"a":{%b}}', b'{"a":[1,[%b]]}', b'{"a":[%b],"b":{%b}}'])
def test_many_values_that_can_not_be_parsed_apart_are_refused(value: bytes) -> None:
    """The parser makes them in one step, and nobody else has a turn meanwhile."""
    pairs = b",".join(b'"%d":{}' % number for number in range(5000))
    within = value.replace(b"{%b}", b"{" + pairs + b"}").replace(b"[%b]", b"[" + b"{}," * 5000 + b"{}]")
    body = within if within.startswith(b"{") else b'{"input":[' + within + b"]}"
    with pytest.raises(Refusal) as refused:
        fields_of(body, LONGEST)
    assert (refused.value.status, refused.value.code) == (413, "too_many_inputs")


def test_a_text_that_is_too_long_is_refused_unparsed() -> None:
    body = b'{"input":"' + b"\\u00e9" * LONGEST + b'"}'
    assert len(fields_of(body, LONGEST)["input"]) == LONGEST
    with pytest.raises(Refusal, match="max_text_bytes"):
        fields_of(body, LONGEST // 2 - SMALL_BYTES)
