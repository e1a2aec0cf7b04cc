"""Bodies of requests: large JSON is what a parser says or is refused unparsed, and forms arrive in any pieces."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from embedctl_gateway.http.bodies import MAX_MARKS, SMALL_BYTES, fields_of
from embedctl_gateway.http.multipart import Form
from embedctl_gateway.http.refusals import Refusal

LONGEST = 2**20
PIECES = ['"', "\\", ",", "[", "]", "{", "}", ":", "é", "😀", "\n", "word "]


def test_a_large_body_is_what_a_parser_says(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    monkeypatch.setattr("embedctl_gateway.http.bodies.SMALL_BYTES", 0)
    for step in (2, 7, 100):
        monkeypatch.setattr("embedctl_gateway.http.bodies._STEP_BYTES", step)
        monkeypatch.setattr("embedctl_gateway.http.bodies.paced", lambda steps: steps)
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


# Forms

TYPE = "multipart/form-data; boundary=bound"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--bound\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


END = b"--bound--\r\n"


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_pieces_the_form_is_the_same(seed: int) -> None:
    dice = random.Random(seed)
    data = b"".join(dice.choice([b"\r\n", b"--bound", b"-", b"text", b"\x00"]) for _ in range(200))
    data = data.replace(b"\r\n--bound", b"\r\n-bound")
    whole = [part("purpose", b"batch"), part("file", data, '; filename="C:\\\\here\\\\a.jsonl"'), part("x[y]", b"1")]
    dice.shuffle(whole)
    body = b"".join(whole) + END
    form, got, at = Form(TYPE), b"", 0
    while at < len(body):
        step = dice.randint(1, 30)
        form.add(body[at : at + step])
        got += form.taken()
        at += step
    assert (got, form.fields, form.complete) == (data, {"purpose": "batch", "x[y]": "1"}, True)
    assert form.file_name == "a.jsonl"


def test_names_of_files_are_bounded_and_can_be_read() -> None:
    names = {"../../etc/passwd": "passwd", "a\x07b": "ab", "n" * 1000: "n" * 255}
    for given, name in names.items():
        form = Form(TYPE)
        form.add(part("file", b"x", f'; filename="{given}"') + END)
        assert form.file_name == name


@pytest.mark.parametrize(
    "body",
    [
        b"not a form at all",
        part("a", b"x" * 10_000) + END,
        part("a", b"1") + part("a", b"2") + END,
        part("file", b"1") + part("file", b"2") + END,
        b"".join(part(f"f{number}", b"1") for number in range(40)) + END,
        b"--bound\r\n" + b"x" * 10_000 + b": y\r\n\r\n",
    ],
)
def test_what_no_form_may_be_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        Form(TYPE).add(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_form")


@pytest.mark.parametrize("kind", ["", "application/json", f"multipart/form-data; boundary={'b' * 999}"])
def test_a_body_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(Refusal) as refused:
        Form(kind)
    assert refused.value.code == "invalid_content_type"
