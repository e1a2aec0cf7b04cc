"""Forms that arrive in pieces."""

from __future__ import annotations

import random

import pytest

from embedctl_gateway.http.multipart import Form
from embedctl_gateway.http.refusals import Refusal

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
