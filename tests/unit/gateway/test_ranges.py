"""Ranges of files."""

from __future__ import annotations

import pytest

from embedctl_gateway.calls.files import Span, Unsatisfiable, span_of

ETAG = '"abc"'


@pytest.mark.parametrize(
    ("asked", "if_range", "span"),
    [
        (None, None, None),
        ("bytes=0-9", None, Span(0, 10)),
        ("bytes=90-", None, Span(90, 100)),
        ("bytes=90-1000", None, Span(90, 100)),
        ("bytes=-10", None, Span(90, 100)),
        ("bytes=-1000", None, Span(0, 100)),
        ("Bytes= 5-5", None, Span(5, 6)),
        ("bytes=0-9", ETAG, Span(0, 10)),
        ("bytes=0-9", 'W/"abc"', None),
        ("bytes=0-9", "Wed, 21 Oct 2015 07:28:00 GMT", None),
        ("bytes=0-9,20-29", None, None),
        ("bytes=9-0", None, None),
        ("bytes=-", None, None),
        ("lines=0-9", None, None),
        ("bytes=0-9" + "9" * 99, None, None),
        ("bytes=1\u0662-", None, None),
    ],
)
def test_what_is_asked_for(asked: str | None, if_range: str | None, span: Span | None) -> None:
    assert span_of(asked, if_range, ETAG, 100) == span


@pytest.mark.parametrize(("asked", "size"), [("bytes=100-", 100), ("bytes=-0", 100), ("bytes=0-", 0), ("bytes=-5", 0)])
def test_what_is_behind_the_end(asked: str, size: int) -> None:
    with pytest.raises(Unsatisfiable):
        span_of(asked, None, ETAG, size)
